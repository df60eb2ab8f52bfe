"""Moves placed by what has been learnt so far (DeepUM, §4 and §5), beside its references.

The ops run past once, in order, as they would reach a runtime. An op with the same phase and the
same operands is the same execution. Where the device is full, what is predicted to be needed last
leaves; what the tables had announced comes back in time, and the rest when it is missed. A steady
problem is seen once before it is decided.

The builder places the moves. What a wrong prediction would fetch in vain is not in the plan: the
simulator of traces (`offcompile.simulate.trace_run`) counts it.
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
    """One policy with three references.

    - `correlation` (default): learnt from what has run before;
    - `oracle`: what is needed last leaves, by the true order, and all comes back in time;
    - `belady`: the same, but each tensor comes back only when it is missed;
    - `lru`: what was used least recently leaves, and comes back when it is missed.
    """

    name: ClassVar[str] = "correlation_prefetch"
    variant: str = "correlation"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} is not one of {', '.join(VARIANTS)}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        """Adds moves to the directs, recomputations and updates that `plan` decides."""
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
        walk = _Walk(problem, machine, plan, self.variant)
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


class _Walk:
    """The ops in order, and which gaps are spent away as they go by."""

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
        #: (tensor, position) of the accesses that nothing had announced
        self.missed: set[tuple[str, int]] = set()
        self._predictor = Predictor()
        self._announced: set[str] = set()
        self._opens: dict[int, list[int]] = {}
        for i, gap in enumerate(self.gaps):
            self._opens.setdefault(gap.first + 1, []).append(i)

    def _all_gaps(self, machine: Machine) -> list[Gap]:
        """Every gap once, on the host where it can be, else on the next tier."""
        tiers = [HOST, *(t.name for t in machine.tiers if t.name not in (DEVICE, HOST))]
        found: dict[tuple[str, str | None], Gap] = {}
        for tier in tiers:
            for gap in find_gaps(self.program, machine, tier).gaps:
                # a clean copy that nobody reads again is dropped anyway
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
        """In how many runs the policy takes the tensor to be needed."""
        age = (j - gap.first) % self.n if self.steady else j - gap.first
        if self.variant == "lru":
            return age
        if self.variant != "correlation":
            return (gap.last - j) % self.n if self.steady else gap.last - j
        window = self._predictor.window
        # the run that is now being looked at has left the chain already
        due = window.due(gap.tensor.id)
        if due is not None:
            return due[0] - window.position + 1
        return max(age, len(window.chain)) if gap.tensor.id in self._announced else age

    def _learn(self, j: int) -> None:
        """One run goes by: what it touches was announced or not, and is remembered."""
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
    """What runs, and on what: DeepUM hashes a kernel's name and arguments."""
    return run.op.phase, run.op.reads, run.op.writes


def _on_demand(plan: Plan, walk: _Walk) -> Plan:
    """The plan with loads that nothing announced begun only when the run before them has ended."""
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
