"""Turns a plan and its simulated times into a static program order that does not depend on timing.

One thread runs the ops. `StartStep` hands a move to its lane, which runs moves in the order in
which they were handed over, each once its dependencies are complete, at any speed; `WaitStep`
blocks the thread until a move is complete. A ledger follows the program: a device copy takes space
from its `StartStep` (a load) or from the `RunStep` that writes it, until the plan no longer needs
it *and* every move that reads or fills it has been waited for. The device never holds more than
that, whatever the lanes do.

The program always fits, for this reason. Let every load start where the simulation starts it,
between the same runs, and let the program wait, if necessary, for each move that had ended there.
Then the program holds no copy that the simulation did not hold at that moment: copies gone by then
had gone because runs had ended, which the program has passed, and because moves had ended, which
it may wait for. The simulation fits, so the program does; and if lanes are as fast as simulated,
no such wait costs any time. From there a load moves in two cases only. It moves earlier, before the
run during which it started, if the ledger has room for it beside that run and no earlier load had
to stay. It moves later if only backward uses it; less is held meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offcompile.ir import (
    DEVICE,
    FORWARD,
    HOST,
    InvalidInput,
    Machine,
    Plan,
    Problem,
    Timeline,
    Violation,
)
from offcompile.ir.units import compressed_bytes

from .copy_lifetimes import CopyArrival, Presence, Step, presence
from .order_memory import OrderLedger


@dataclass(frozen=True)
class RunStep:
    """Runs an op: its id, or `F2@B2` for a recomputation."""

    name: str


@dataclass(frozen=True)
class StartStep:
    """Hands a move to its lane."""

    move: str


@dataclass(frozen=True)
class WaitStep:
    """Blocks the program until a move is complete."""

    move: str


ProgramStep = RunStep | StartStep | WaitStep


@dataclass(frozen=True)
class Order:
    """The program, and the most it can hold at any speed of the lanes.

    `device_bytes`: during each run, in the order of the runs, including workspace;
    `peak_bytes`: at any point. `tier_bytes`: the other tiers, if no copy there is freed before
    the step ends and each move adds one of its own; their capacities are not checked.
    """

    steps: tuple[ProgramStep, ...]
    device_bytes: tuple[int, ...]
    peak_bytes: int
    tier_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)
    #: number of steps that belong to the forward program
    split: int = 0

    def forward(self) -> tuple[ProgramStep, ...]:
        """The steps up to the last forward run and the moves off the device that it triggers."""
        return self.steps[: self.split]

    def backward(self) -> tuple[ProgramStep, ...]:
        """The remaining steps: everything recomputed or run after the last forward op."""
        return self.steps[self.split :]


def static_order(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> Order:
    """Returns the program order of a plan with a valid timeline; the problem must not be steady.

    - Moves off the device and between other tiers start as soon as their trigger, the writes of
      their tensor and their lane's order allow.
    - A load starts before the run during which the simulation starts it, or else before the
      next run. A load that only backward uses starts in the backward program, after the loads
      that forward needs, unless something else in forward waits for its end.
    - Waits are placed where a run needs the data, where the plan says `ready_before`, and where
      space is needed; the latter wait for copies in the order in which the simulation freed them.
    - Host updates run in the thread, where the simulation starts them among the ops.
    """
    if problem.steady:
        detail = "the problem is steady; a static order is for one step by itself: set steady false"
        raise InvalidInput([Violation("steady", "problem", detail)])
    if timeline.violations or not timeline.steps:
        detail = "the timeline is not that of a valid plan; simulate the plan and mend it first"
        raise InvalidInput([*timeline.violations, Violation("bad-value", "timeline", detail)])
    found = presence(problem, machine, plan, timeline)
    writer = _OrderWriter(problem, machine, plan, found)
    writer.write()
    return Order(
        tuple(writer.steps),
        tuple(writer.device_bytes),
        writer.ledger.peak,
        _tier_bytes(problem, machine, plan, found),
        writer.split,
    )


class _OrderWriter:
    """The program written so far."""

    def __init__(self, problem: Problem, machine: Machine, plan: Plan, found: Presence) -> None:
        self.found, self.arrivals = found, found.arrivals
        self.forward_runs = _forward_runs(problem, found)
        self.steps: list[ProgramStep] = []
        self.device_bytes: list[int] = []
        self.split = 0
        capacity = machine.tier[DEVICE].capacity_bytes
        self.ledger = OrderLedger(
            capacity, found.arrivals, lambda m: self.steps.append(WaitStep(m))
        )
        self.place_of = {m: i for ids in found.moves_of.values() for i, m in enumerate(ids)}
        self.begun = dict.fromkeys(found.moves_of, 0)  # tensor → number of its moves started
        self.outs: dict[str, list[str]] = {}  # lane → moves not yet started, the next one last
        for move in reversed(plan.moves):
            if move.target != DEVICE:
                self.outs.setdefault(move.lane, []).append(move.id)
        loads = [a for a in found.arrivals.values() if a.stay is not None]  # as they started
        late = _only_backward(plan, found, loads, self.forward_runs)
        self.late = [a for a in loads if a.move.id in late]
        self.loads = deque(a for a in loads if a.move.id not in late)

    def write(self) -> None:
        """Writes the program boundary by boundary: before each run, and at the end."""
        ledger = self.ledger
        for stay in self.found.at_start:
            ledger.begin(stay)
        self._start_outs()
        for j, step in enumerate(self.found.steps):
            if j == self.forward_runs:
                self.split = len(self.steps) if j else 0
                self.loads = deque(sorted((*self.late, *self.loads), key=lambda a: a.position))
            while self.loads and self.loads[0].runs_before <= j:
                self._load(self.loads.popleft(), step)
            new = [s for s in step.stays if ledger.there.get(s.tensor) is not s]
            workspace = 0 if step.run.on_host else step.run.op.workspace_bytes
            room = workspace + sum(s.nbytes for s in new)
            self._loads_before(step, room, waiting=False)
            ledger.wait(step.awaits)
            for stay in new:
                ledger.clear(stay.tensor)
            ledger.make_room(room, step)
            self._loads_before(step, room, waiting=True)
            for stay in new:
                ledger.begin(stay)
            self.steps.append(RunStep(step.run.id))
            self.device_bytes.append(ledger.end_run(workspace))
            self._start_outs()
        for load in self.loads:
            self._load(load, None)
        if self.forward_runs == len(self.found.steps):
            self.split = len(self.steps)

    def _load(self, load: CopyArrival, step: Step | None, beside_bytes: int = 0) -> None:
        """Starts a load, after making room for it and for `beside_bytes` held beside it."""
        stay = load.stay
        if stay is not None and self.ledger.there.get(stay.tensor) is not stay:
            self.ledger.clear(stay.tensor)
            self.ledger.make_room(stay.nbytes + beside_bytes, step)
            self.ledger.begin(stay)
        self._start(load.move.id)
        self._start_outs()

    def _loads_before(self, step: Step, beside_bytes: int, waiting: bool) -> None:
        """Starts loads that the simulation starts during `step` and that fit before it."""
        loads, ledger = self.loads, self.ledger
        while loads and loads[0].in_a_run and loads[0].runs_before == ledger.runs_done + 1:
            stay = loads[0].stay
            if stay is None or not self._ready(loads[0]):
                return
            if not ledger.could_begin(stay, beside_bytes, step if waiting else None):
                return
            self._load(loads.popleft(), step, beside_bytes)

    def _start_outs(self) -> None:
        """Starts every move off the device, or between other tiers, that may start by now."""
        again = True
        while again:
            again = False
            for queue in self.outs.values():
                while queue and self._ready(self.arrivals[queue[-1]]):
                    self._start(queue.pop())
                    again = True

    def _ready(self, arrival: CopyArrival) -> bool:
        """True if the move's trigger and earlier moves and runs of its tensor allow it to start."""
        move, after = arrival.move, arrival.move.start_after
        return (
            arrival.after_run < self.ledger.runs_done
            and self.begun[move.tensor] == self.place_of[move.id]
            and (after not in self.arrivals or after in self.ledger.started)
        )

    def _start(self, move: str) -> None:
        self.ledger.started.add(move)
        self.begun[self.arrivals[move].move.tensor] += 1
        self.steps.append(StartStep(move))


def _forward_runs(problem: Problem, found: Presence) -> int:
    """The number of runs up to the last forward op."""
    names = [s.run.id for s in found.steps]
    forward = [i for i, x in enumerate(names) if x in problem.op and problem.op[x].phase == FORWARD]
    return forward[-1] + 1 if forward else 0


def _only_backward(
    plan: Plan, found: Presence, loads: Sequence[CopyArrival], forward_runs: int
) -> set[str]:
    """Loads that the forward program does not need, neither for their data nor for their end."""
    if not 0 < forward_runs < len(found.steps):
        return set()
    boundary = found.steps[forward_runs].position
    touched: dict[str, int] = {}
    for i, step in enumerate(found.steps[:forward_runs]):
        touched.update(dict.fromkeys(step.run.op.operands, i))
    moved: dict[str, int] = {}
    for t, ids in found.moves_of.items():
        positions = (found.arrivals[m].position for m in ids)
        moved[t] = max((p for p in positions if p < boundary), default=-1)
    # moves whose end forward waits for: a drop, or another move that is not late itself
    awaited = {d.after for d in plan.drops if d.tier == DEVICE}
    early = (m for m in plan.moves if found.arrivals[m.id].position < boundary)
    awaited |= {m.start_after for m in early if m.target != DEVICE}
    late: set[str] = set()
    for load in reversed(loads):
        move, stay = load.move, load.stay
        used = (
            touched.get(move.tensor, -1) >= load.runs_before
            or moved[move.tensor] > load.position
            or move.id in awaited
            or found.index.get(move.ready_before or "", forward_runs) < forward_runs
            or (stay is not None and stay.gone_at is not None and stay.gone_at <= forward_runs)
        )
        if load.runs_before >= forward_runs or not used:
            late.add(move.id)
        else:
            awaited.add(move.start_after)
    return late


def _tier_bytes(problem: Problem, machine: Machine, plan: Plan, found: Presence) -> dict[str, int]:
    total = {t.name: 0 for t in machine.tiers if t.name != DEVICE}
    workspace = 0
    there: set[tuple[str, str]] = set()
    for start in plan.start:
        there.add((start.tensor, start.tier))
    for step in found.steps:
        run = step.run
        there |= {(t, run.tier_of(t)) for t in run.op.writes}
        if run.on_host:
            workspace = max(workspace, run.op.workspace_bytes)
    for tensor, tier in there:
        if tier != DEVICE:
            total[tier] += problem.tensor[tensor].nbytes
    for move in plan.moves:
        if move.target != DEVICE:
            nbytes, codec = problem.tensor[move.tensor].nbytes, move.codec
            ratio = None if codec is None else problem.tensor[move.tensor].ratios[codec]
            total[move.target] += nbytes if ratio is None else compressed_bytes(nbytes, ratio)
    if workspace:
        total[HOST] += workspace
    return total
