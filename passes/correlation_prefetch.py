"""Places moves by learned correlations (DeepUM, §4 and §5), next to its reference policies.

The ops pass once, in order, as a runtime would see them. Ops with the same phase and the same
operands count as the same execution. When the device is full, the tensor predicted to be needed
last is evicted; tensors that the tables predict are prefetched in time, and the others are loaded
on a miss. A steady problem is observed for one step before decisions start.

The builder places the moves. Useless prefetches after a wrong prediction are not in the plan: the
simulator of traces (`offcompile.simulate.trace_run`) counts them.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem

from .build.contract import Judge
from .build.decisions import Decisions
from .build.gaps import Gap, find_gaps
from .build.program import Program, RunOf, span, too_small
from .build.schedule import Builder
from .correlation.predictor import Predictor

VARIANTS = ("correlation", "oracle", "belady", "lru")


@dataclass(frozen=True)
class CorrelationPrefetch:
    """Correlation prefetching and three reference policies.

    - `correlation` (default): learned from earlier executions;
    - `oracle`: evicts the tensor needed last in the true order, and reloads everything in time;
    - `belady`: the same, but reloads each tensor only on a miss;
    - `lru`: evicts the least recently used tensor, and reloads it on a miss.
    """

    name: ClassVar[str] = "correlation_prefetch"
    variant: str = "correlation"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} is not one of {', '.join(VARIANTS)}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        """Adds moves to the direct accesses, recomputations and updates that `plan` decides."""
        made = self._made(problem, machine, plan)
        timeline = None if self.judge is None else self.judge(problem, machine, made)
        if timeline is not None and not timeline.valid:
            raise Infeasible(
                "Everything that can leave the device fits it, but the plan found does not run:"
                f" {timeline.violations[0].detail}.",
                None,
                "Raise the capacity of the tier named, or use the policy joint.",
            )
        return made

    def _made(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        walk = _PrefetchWalk(problem, machine, plan, self.variant)
        walk.run()
        away = tuple(walk.gaps[i].away for i in sorted(walk.away))
        decisions = replace(walk.base, away=away)
        builder = Builder(problem, machine, decisions)
        if self.variant in ("lru", "belady"):
            return builder.lazy()
        made = builder.best(self.judge)
        if self.variant == "oracle" or not walk.missed:
            return made
        late = _on_demand(made, walk)
        if self.judge is None or self.judge(problem, machine, late).valid:
            return late
        return made


class _PrefetchWalk:
    """Walks the ops in order, and chooses the gaps in which to evict as they go by."""

    def __init__(self, problem: Problem, machine: Machine, plan: Plan, variant: str) -> None:
        self.steady, self.variant = problem.steady, variant
        self.base = Decisions((), plan.directs, plan.recomputes, plan.updates)
        self.program = Program(problem, self.base)
        self.runs = self.program.runs
        self.n = len(self.runs)
        capacity = machine.tier[DEVICE].capacity_bytes
        self.capacity = float("inf") if capacity is None else capacity
        self.held = list(Builder(problem, machine, self.base, check=False).kept_bytes)
        self.nbytes = {t.id: t.nbytes for t in problem.tensors}
        self.gaps = self._all_gaps(machine)
        self.away: set[int] = set()
        #: (tensor, position) of accesses that were not predicted
        self.missed: set[tuple[str, int]] = set()
        self._predictor = Predictor()
        self._announced: set[str] = set()
        self._opens: dict[int, list[int]] = {}
        for i, gap in enumerate(self.gaps):
            self._opens.setdefault(gap.first + 1, []).append(i)

    def _all_gaps(self, machine: Machine) -> list[Gap]:
        """Returns every gap once, on the host if possible, else on the next tier."""
        tiers = [HOST, *(t.name for t in machine.tiers if t.name not in (DEVICE, HOST))]
        found: dict[tuple[str, str | None], Gap] = {}
        for tier in tiers:
            for gap in find_gaps(self.program, machine, tier).gaps:
                # a clean copy that is not read again is dropped anyway
                if gap.dirty or gap.last < self.n or self.steady:
                    found.setdefault((gap.tensor.id, gap.after), gap)
        return list(found.values())

    def run(self) -> None:
        if max(self.held, default=0) <= self.capacity:
            return
        if self.variant == "correlation" and self.steady:
            for j in range(self.n):
                self._learn(j)
            self.missed.clear()
        around = [i for i, gap in enumerate(self.gaps) if gap.last <= gap.first and gap.last > 0]
        is_open = dict.fromkeys(around)
        for j in range(self.n):
            is_open.update(dict.fromkeys(self._opens.get(j, ())))
            for i in [i for i in is_open if not self._covers(self.gaps[i], j)]:
                del is_open[i]
            if self.variant == "correlation":
                self._learn(j)
            if self.held[j] > self.capacity:
                self._let_go(j, [i for i in is_open if i not in self.away])

    def _covers(self, gap: Gap, j: int) -> bool:
        if gap.last > gap.first:
            return gap.first < j < gap.last
        return j > gap.first or j < gap.last

    def _let_go(self, j: int, candidates: list[int]) -> None:
        candidates.sort(key=lambda i: (-self._needed_in(self.gaps[i], j), i))
        for i in candidates:
            if self.held[j] <= self.capacity:
                return
            gap = self.gaps[i]
            self.away.add(i)
            for k in span(gap.first, gap.last, self.n):
                self.held[k] -= gap.tensor.nbytes
        if self.held[j] > self.capacity:
            what = f"{self.program.op_bytes[j]:,} of its own and what has no way out and back"
            raise too_small(j, self.held[j], int(self.capacity), self.program, what)

    def _needed_in(self, gap: Gap, j: int) -> int:
        """Returns the number of runs until the policy expects the tensor to be needed."""
        age = (j - gap.first) % self.n if self.steady else j - gap.first
        if self.variant == "lru":
            return age
        if self.variant != "correlation":
            return (gap.last - j) % self.n if self.steady else gap.last - j
        window = self._predictor.window
        # the chain no longer contains the current run
        due = window.due(gap.tensor.id)
        if due is not None:
            return due[0] - window.position + 1
        return max(age, len(window.chain)) if gap.tensor.id in self._announced else age

    def _learn(self, j: int) -> None:
        """Learns from one run, and records which of its tensors were not predicted."""
        run, predictor = self.runs[j], self._predictor
        window = predictor.window
        execution = _execution(run)
        as_expected = bool(window.chain) and window.chain[0][0] == execution
        expected = {item.block for item in window.chain[0][1]} if as_expected else set()
        predictor.enter(execution)
        reads = set(run.op.reads)
        for t in run.op.operands:
            predictor.touch(t, self.nbytes[t], reads=t in reads)
            if t in expected:
                self._announced.add(t)
            else:
                self._announced.discard(t)
                self.missed.add((t, j))
        predictor.leave()


def _execution(run: RunOf) -> Hashable:
    """Returns the key of an execution; DeepUM hashes a kernel's name and arguments."""
    return run.op.phase, run.op.reads, run.op.writes


def _on_demand(plan: Plan, walk: _PrefetchWalk) -> Plan:
    """Returns the plan with unpredicted loads delayed until the run before their use has ended."""
    position, runs = walk.program.position, walk.runs
    moves = []
    for move in plan.moves:
        need = position.get(move.ready_before or "")
        if (
            need
            and move.target == DEVICE
            and not move.wraps
            and (move.tensor, need) in walk.missed
            and not runs[need - 1].on_host
        ):
            move = replace(move, start_after=runs[need - 1].name)
        moves.append(move)
    return replace(plan, moves=tuple(moves))
