"""Saved activations leave the device between their forward and their backward use.

FlashNeuron §3.3 (`variant="printed"`) and ours (`"benefit"`), on the same candidates: the gaps
that an activation spends on the device if nothing moves. The figures come from
`spill_options.py`, the choice from `activation_selection.py`, the plan from the one builder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offcompile.ir import (
    DEVICE,
    HOST,
    Infeasible,
    Machine,
    Plan,
    Problem,
    Timeline,
)

from .activation_selection import (
    by_benefit,
    by_makespan,
    missing_bytes,
    printed,
)
from .contract import Judge
from .decisions import Decisions
from .pressure import Pressure, pressure
from .schedule import build
from .spill_options import Gap, decide, gaps_of, room_beyond

VARIANTS = ("benefit", "printed")
TIERS = ("host+disk", "host", "disk")
#: what is left over the budget is asked for again so often
REPAIRS = 6
#: rounds of `by_makespan` at first, and in each answer to the judge
FULL, BRIEF = 24, 8


@dataclass(frozen=True)
class ActivationSpill:
    """Activations to the host or to disk, as they are or compressed, or recomputed."""

    name: ClassVar[str] = "activation_spill"

    variant: str = "benefit"
    tiers: str = "host+disk"
    #: whether codecs that lose precision may be used
    lossy: bool = False
    #: whether an activation may be computed again instead
    recompute: bool = False
    #: how many further plans the judge is asked about
    rounds: int = 8
    judge: Judge | None = None

    def __post_init__(self) -> None:
        for field, value, known in (
            ("variant", self.variant, VARIANTS),
            ("tiers", self.tiers, TIERS),
        ):
            if value not in known:
                raise ValueError(f"{field} is {value!r}; it must be one of {', '.join(known)}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        return _Search(self, problem, machine).run()


class Trials:
    """Builds decisions, asks the judge, and keeps the best legal plan."""

    def __init__(self, problem: Problem, machine: Machine, judge: Judge | None) -> None:
        self.problem, self.machine, self.judge = problem, machine, judge
        self.best: Plan | None = None
        self.best_us = float("inf")
        self.best_timeline: Timeline | None = None
        self.best_decisions = Decisions()
        self.refused = ""
        self.seen: set[Decisions] = set()

    def attempt(self, decisions: Decisions) -> bool:
        """Whether these decisions give a plan better than the best so far."""
        if decisions in self.seen:
            return False
        self.seen.add(decisions)
        try:
            plan = build(self.problem, self.machine, decisions, self.judge)
        except Infeasible as error:
            self.refused = error.reason
            return False
        makespan_us, timeline = 0.0, None
        if self.judge is not None:
            timeline = self.judge(self.problem, self.machine, plan)
            if not timeline.valid:
                self.refused = f"The plan stops: {timeline.violations[0]}."
                return False
            makespan_us = timeline.makespan_us
        if makespan_us >= self.best_us:
            return False
        self.best, self.best_us, self.best_timeline = plan, makespan_us, timeline
        self.best_decisions = decisions
        return True


class _Search:
    def __init__(self, options: ActivationSpill, problem: Problem, machine: Machine) -> None:
        self.options, self.problem, self.machine = options, problem, machine
        self.trials = Trials(problem, machine, options.judge)
        self.base: Pressure = pressure(problem, Decisions())
        self.excess = self.base.excess(machine)

    def run(self) -> Plan:
        if max(self.excess, default=0) <= 0:
            self.trials.attempt(Decisions())
            if self.trials.best is not None:
                return self.trials.best
            raise self._nothing_works()
        options = self.options
        tiers = [t for t in options.tiers.split("+") if t in self.machine.tier]
        if options.variant == "printed":
            tiers = tiers[-1:]  # one place for all: the SSD, where there is one
        args = (self.problem, self.machine, self.base, tiers, options.lossy)
        self.gaps = gaps_of(*args, recompute=options.recompute and options.variant == "benefit")
        self.candidates = [g.candidate for g in self.gaps]
        self._check_floor()
        self.limits = room_beyond(self.machine, self.base)
        if options.variant == "printed":
            self._printed()
        else:
            self._benefit()
        if self.trials.best is None:
            self._everything()
        if self.trials.best is None:
            raise self._nothing_works()
        return self.trials.best

    # ---- the two variants ----------------------------------------------------------------

    def _printed(self) -> None:
        """Only what the forward pass saves, by sums (§3.3); asked for more until it fits.

        Where sums mislead and all of that is not enough, any gap is a candidate.
        """
        forward = [i for i, g in enumerate(self.gaps) if g.saved]
        forward_ns = sum(
            round(1000 * o.duration_us) for o in self.problem.ops if o.phase == "forward"
        )
        for pool in (forward, list(range(len(self.gaps)))):
            candidates = [self.candidates[i] for i in pool]
            total = sum(c.nbytes for c in candidates)
            others = self._all_away(pool)
            asked = max(1, total + max(others))
            while self.trials.best is None:
                picked = printed(candidates, asked, forward_ns)
                choice: list[int | None] = [None] * len(self.candidates)
                for i, option in zip(pool, picked, strict=True):
                    choice[i] = option
                missing = missing_bytes(self.candidates, tuple(choice), self.excess)
                if missing == 0:
                    self.trials.attempt(decide(self.gaps, tuple(choice)))
                if asked > total:
                    break
                asked += max(missing, total // 16, 1)

    def _benefit(self) -> None:
        """Least transfer and least time on the lanes; then room where the judge saw waiting.

        Recomputation joins once there is a plan without it to beat.
        """
        moves_only = [g.without_recompute() for g in self.gaps]
        for gaps in (moves_only, self.gaps) if self.gaps != moves_only else (moves_only,):
            best: dict[str, int] | None = None
            for limits in self._limits():
                if self._repaired(gaps, limits, self.excess, 0):
                    best = limits
            self._repaired(gaps, self.limits if best is None else best, self.excess, FULL)
        if self.options.judge is None:
            return
        need = list(self.excess)
        for at in range(self.options.rounds):
            timeline = self.trials.best_timeline
            if timeline is None or not timeline.stalls:
                break
            need = self._relieve(need, timeline)
            gaps, limits = self.found
            if self._repaired(gaps, limits, need, 0 if at % 2 == 0 else BRIEF):
                need = list(self.excess)

    def _limits(self) -> list[dict[str, int]]:
        """What each tier may take in: all its room, or less where it is also a stop on the way."""
        stop = max((g.candidate.nbytes for g in self.gaps), default=0)
        room = self.limits.get(HOST)
        if room is None or not any(g.over_host for g in self.gaps):
            return [self.limits]
        return [
            self.limits | {HOST: max(0, room - reserve)} for reserve in (2 * stop, stop, 0, room)
        ]

    def _repaired(
        self, gaps: Sequence[Gap], limits: dict[str, int], wanted: Sequence[int], rounds: int
    ) -> bool:
        """Select and build; what recomputation brings on top is asked for as well.

        `rounds` 0: for the least transfer; else so many for the least time on the lanes.
        """
        candidates = [g.candidate for g in gaps]
        need = [min(n, m) for n, m in zip(wanted, self.coverable, strict=True)]
        for _ in range(REPAIRS):
            if rounds:
                choice = by_makespan(candidates, need, *self._turn(), limits, rounds)
            else:
                choice = by_benefit(candidates, need, limits)
            if choice is None:
                return False
            decisions = decide(gaps, choice)
            over = self._over(decisions)
            if max(over) <= 0:
                better = self.trials.attempt(decisions)
                if better:
                    self.found = (gaps, limits)
                return better
            need = [
                min(n + max(0, o), m) for n, o, m in zip(need, over, self.coverable, strict=True)
            ]
        return False

    def _over(self, decisions: Decisions) -> list[int]:
        """What is still over the budget, at each run of the problem as it is."""
        if not decisions.recomputes:
            return [0]
        after = pressure(self.problem, decisions)
        over = after.excess(self.machine)
        at_ops = [0] * len(self.excess)
        place = 0
        for run, extra in zip(after.program.runs, over, strict=True):
            at_ops[place] = max(at_ops[place], extra)
            place += run.name == self.problem.ops[place].id
        return at_ops

    def _relieve(self, need: list[int], timeline: Timeline) -> list[int]:
        """Ask for more room where the plan waited longest: beside what was on the move there."""
        moved = {m.id: m for m in (self.trials.best.moves if self.trials.best else ())}
        position = self.base.program.position
        need = list(need)
        for stall in sorted(timeline.stalls, key=lambda s: -s.duration_ns)[:8]:
            if stall.op not in position:
                continue
            tensors = {moved[w].tensor for w in stall.waited_for if w in moved}
            nbytes = sum(self.problem.tensor[t].nbytes for t in tensors)
            nbytes = nbytes or max(c.nbytes for c in self.candidates)
            at = position[stall.op]
            for p in range(max(0, at - 2), at + 1):
                need[p] += nbytes
        return need

    # ---- figures ------------------------------------------------------------------------

    def _turn(self) -> tuple[int, int]:
        """Compute time before and after the run where most must be away."""
        starts = self.base.program.starts_us()
        at = self.excess.index(max(self.excess))
        forward_ns = round(starts[at] * 1000)
        return forward_ns, round(starts[-1] * 1000) - forward_ns

    def _all_away(self, pool: Sequence[int]) -> list[int]:
        left = list(self.excess)
        for i in pool:
            for at in range(self.gaps[i].first, self.gaps[i].last + 1):
                left[at] -= self.gaps[i].candidate.nbytes
        return left

    def _check_floor(self) -> None:
        everyone = range(len(self.gaps))
        left = self._all_away(everyone)
        self.coverable = [e - x for e, x in zip(self.excess, left, strict=True)]
        missing = max(left)
        if missing <= 0:
            return
        run = self.base.program.runs[left.index(missing)]
        capacity = self.machine.tier[DEVICE].capacity_bytes or 0
        raise Infeasible(
            f"{run.name} needs {capacity + missing:,} bytes on the device even when every"
            f" activation that can leave has left ({len(self.gaps)} can), and the budget is"
            f" {capacity:,}: {missing:,} are missing.",
            missing,
            f"Raise the device budget to {capacity + missing:,} bytes, or let weights and states"
            " leave too (policy joint).",
        )

    def _everything(self) -> None:
        """The last resort: all that can leave does."""
        gaps = [g.without_recompute() for g in self.gaps]
        for limits in [*self._limits(), {}]:
            choice = by_benefit([g.candidate for g in gaps], self.coverable, limits)
            if choice is not None and self.trials.attempt(decide(gaps, choice)):
                break

    def _nothing_works(self) -> Infeasible:
        full = [t for t, room in room_beyond(self.machine, self.base).items() if room < 1 << 62]
        names = " and ".join(full) if full else "other"
        missing = max(1, max(self.excess, default=0))
        return Infeasible(
            f"No choice of activations gives a plan that runs to its end. {self.trials.refused}",
            missing,
            f"Raise the device budget by {missing:,} bytes (then nothing need move), or the budget"
            f" of the {names} tier.",
        )


__all__ = ["ActivationSpill", "Gap", "Trials"]
