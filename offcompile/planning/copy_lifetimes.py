"""The copies of a simulated plan without clock times: births, ends, and who waits for whom.

Replays a timeline once, with the auditor's own accounts. A *stay* is an uninterrupted stretch of a
tensor on the device. The conditions that free its bytes are recorded as events (runs passed, moves
complete), so that bytes can be counted as free without a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offcompile.ir import DEVICE, Machine, Move, Plan, Problem, Span, Timeline
from offcompile.ir.verify.frees import Frees
from offcompile.ir.verify.ledger import Ledger, Place
from offcompile.ir.verify.order import VerifiedRun, executed, start_codecs, touches


@dataclass(eq=False)
class Lifetime:
    """A device copy, from the event that takes its space to the one that frees it.

    Its space is free once the run `gate` has ended and the moves in `needs` are complete: those
    that read or fill it, and the one after which it is dropped.
    """

    tensor: str
    nbytes: int
    needs: set[str] = field(default_factory=set)
    gate: int = -1
    asked_by: str | None = None
    #: number of runs that had started when it went; None: it is there at the end
    gone_at: int | None = None


@dataclass
class CopyArrival:
    """One move as simulated. `position` counts all starts, of runs and moves, in their order."""

    move: Move
    span: Span
    position: int
    #: number of runs that had started before it, and whether the last of them was still running
    runs_before: int
    in_a_run: bool
    #: the last run that must have ended: its trigger, a write of its tensor before it, or a use of
    #: the previous copy on its target
    after_run: int
    stay: Lifetime | None  # the stay that it fills, if its target is the device


@dataclass
class Step:
    """One run as simulated."""

    run: VerifiedRun
    span: Span
    position: int
    stays: list[Lifetime] = field(default_factory=list)  # stays that it writes
    awaits: list[str] = field(default_factory=list)  # moves that must be complete before it


@dataclass
class Presence:
    """Runs and moves in the order in which they started, and the stays that they begin."""

    steps: list[Step] = field(default_factory=list)
    arrivals: dict[str, CopyArrival] = field(default_factory=dict)
    at_start: list[Lifetime] = field(default_factory=list)
    #: per tensor, its moves in the order in which they started
    moves_of: dict[str, list[str]] = field(default_factory=dict)
    #: run name → its index in `steps`
    index: dict[str, int] = field(default_factory=dict)


def presence(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> Presence:
    """Analyses `timeline`, which must be valid for `plan`; the problem must not be steady."""
    return _Replay(problem, machine, plan).run(timeline)


class _Replay:
    def __init__(self, problem: Problem, machine: Machine, plan: Plan) -> None:
        self.problem = problem
        runs = executed(problem, plan)
        self.runs = {r.id: r for r in runs}
        self.moves = {m.id: m for m in plan.moves}
        self.ledger = Ledger(problem, machine)
        self.frees = Frees(problem, plan, self.ledger, touches(runs))
        self.asks: dict[str | None, list[str]] = {}
        for drop in plan.drops:
            if drop.tier == DEVICE:
                self.asks.setdefault(drop.after, []).append(drop.tensor)
        self.start = start_codecs(problem, plan)
        self.stays: dict[str, Lifetime] = {}  # on the device now
        self.filler: dict[Place, str | None] = {}  # the move that brought each copy, if any
        self.written: dict[str, int] = {}  # tensor → the last run that wrote it
        self.used: dict[Place, int] = {}  # the last run that used a copy there
        self.found = Presence()
        before: dict[str, list[str]] = {}
        for m in plan.moves:
            if m.ready_before is not None:
                before.setdefault(m.ready_before, []).append(m.id)
        self.ready_before = before

    def run(self, timeline: Timeline) -> Presence:
        for place in self.start:
            self._hold(place)
            self.ledger.hold(place, None, valid=True)
        self.found.at_start = list(self.stays.values())
        self.frees.begin_step()
        self._asked(None)
        self._free()
        running: list[Span] = []
        for position, span in enumerate(timeline.spans):
            for end in sorted({s.end_ns for s in running if s.end_ns <= span.start_ns}):
                self._complete([s for s in running if s.end_ns == end])
            running = [s for s in running if s.end_ns > span.start_ns]
            if span.id in self.runs:
                self._start_run(span, position)
            else:
                self._start_move(span, position)
            running.append(span)
        return self.found

    # ---- starts --------------------------------------------------------------------------

    def _start_run(self, span: Span, position: int) -> None:
        run, here = self.runs[span.id], len(self.found.steps)
        step = Step(run, span, position)
        self.found.index[run.id] = here
        self.frees.begin_run(run)
        awaits = list(self.ready_before.get(run.id, ()))
        for tensor in run.op.operands:
            place = (tensor, run.tier_of(tensor))
            brought = self.filler.get(place)
            if tensor in run.op.reads and brought is not None:
                awaits.append(brought)
            if tensor in run.op.writes:
                awaits += self.found.moves_of.get(tensor, ())
                for copy in self.ledger.of(tensor).values():
                    copy.valid = False
                stay = self._hold(place)
                if stay is not None:
                    step.stays.append(stay)
                self.filler[place] = None
                self.written[tensor] = here
            used = self.ledger.get(place)
            if used is not None:
                used.users += 1
            self.used[place] = here
            if tensor in self.stays:
                self.stays[tensor].gate = here
        step.awaits = list(dict.fromkeys(awaits))
        self.found.steps.append(step)

    def _start_move(self, span: Span, position: int) -> None:
        move, steps = self.moves[span.id], self.found.steps
        place = (move.tensor, move.target)
        stay = self._hold(place)
        for tier in (move.source, move.target):
            used = self.ledger.get((move.tensor, tier))
            if used is not None:
                used.users += 1
        if move.tensor in self.stays and DEVICE in (move.source, move.target):
            self.stays[move.tensor].needs.add(move.id)
        self.filler[place] = move.id
        self.found.moves_of.setdefault(move.tensor, []).append(move.id)
        trigger = self.found.index.get(move.start_after or "", -1)
        self.found.arrivals[move.id] = CopyArrival(
            move,
            span,
            position,
            len(steps),
            bool(steps) and steps[-1].span.end_ns > span.start_ns,
            max(trigger, self.written.get(move.tensor, -1), self.used.get(place, -1)),
            stay,
        )

    def _hold(self, place: Place) -> Lifetime | None:
        """Takes space for a copy, not valid yet; returns its stay if it is on the device."""
        self.ledger.hold(place, None, valid=False)
        if place[1] != DEVICE:
            return None
        tensor = place[0]
        if tensor not in self.stays:
            self.stays[tensor] = Lifetime(tensor, self.problem.tensor[tensor].nbytes)
        return self.stays[tensor]

    # ---- ends ----------------------------------------------------------------------------

    def _complete(self, spans: list[Span]) -> None:
        """Ends the spans of one instant, then frees the copies that this releases."""
        for span in spans:
            run = self.runs.get(span.id)
            if run is None:
                move = self.moves[span.id]
                uses = {move.source: False, move.target: True}
                self._release_uses(move.tensor, uses)
                self.frees.end_move(move.tensor)
            else:
                for tensor in run.op.operands:
                    uses = {run.tier_of(tensor): tensor in run.op.writes}
                    self._release_uses(tensor, uses)
                self.frees.end_run(run)
        for span in spans:
            self._asked(span.id)
        self._free()

    def _release_uses(self, tensor: str, tiers: dict[str, bool]) -> None:
        """Ends uses of the copies on these tiers; True: the copy is valid from now on."""
        for tier, filled in tiers.items():
            copy = self.ledger.get((tensor, tier))
            if copy is not None:
                copy.users -= 1
                copy.valid |= filled

    def _asked(self, event: str | None) -> None:
        self.frees.ask(event)
        for tensor in self.asks.get(event, ()):
            stay = self.stays.get(tensor)
            if stay is not None and event is not None and stay.asked_by is None:
                stay.asked_by = event

    def _free(self) -> None:
        for place in self.frees.due():
            # this free may have relied on another copy of the tensor that is now gone
            grounds = self.frees.grounds(place)
            if not grounds:
                continue
            self.frees.release(place)
            if place[1] == DEVICE:
                self._end_stay(self.stays.pop(place[0]), "death" in grounds)

    def _end_stay(self, stay: Lifetime, died: bool) -> None:
        stay.gone_at = len(self.found.steps)
        if stay.asked_by is not None and not died:
            if stay.asked_by in self.moves:
                stay.needs.add(stay.asked_by)
            else:
                stay.gate = max(stay.gate, self.found.index[stay.asked_by])
