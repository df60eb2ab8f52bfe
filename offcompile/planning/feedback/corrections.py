"""Corrects planned compute times by those of measured steps.

Costs of ops are measured one by one and cached; on another day, or beside another program, the
same machine is slower by a factor. Forward and backward get a factor each; waits do not count as
computing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from offcompile.ir import COMPUTE, Machine, Op, Plan, Problem, Timeline
from offcompile.planning.timelines import settled_spans
from offcompile.simulate import Simulator

from .measured import MeasuredStep

FORWARD, BACKWARD = "forward", "backward"
#: factors within this range count as 1
SAME = 1.15
#: upper limit on the share of a half that moves are taken to cost
MOST_TOLL = 0.5


@dataclass(frozen=True)
class Factors:
    """Measured times of the ops of each half, over their costs. Updates are part of backward."""

    forward: float = 1.0
    backward: float = 1.0

    def of(self, phase: str) -> float:
        return self.forward if phase == FORWARD else self.backward

    @property
    def same(self) -> bool:
        """True if the costs are right, except for noise."""
        return all(1 / SAME <= f <= SAME for f in (self.forward, self.backward))

    def times(self, other: Factors) -> Factors:
        """Return the factors of costs as they were before others had multiplied them."""
        return Factors(self.forward * other.forward, self.backward * other.backward)

    def words(self) -> str:
        return f"forward takes {self.forward:.2f} × its costs, backward {self.backward:.2f} ×"


@dataclass(frozen=True)
class Corrected:
    """A plan's step with costs corrected by measured steps."""

    step_us: float
    factors: Factors


def factors_of(
    problem: Problem, plan: Plan, timeline: Timeline, step: MeasuredStep
) -> Factors | None:
    """The factors of one measured step of a plan; None if there is nothing to compare.

    Recomputations of forward ops in backward count as slow as forward is.
    """
    planned_us, again_us = _planned_us(problem, plan, timeline)
    tolls_us = _tolls_us(problem, plan, timeline)
    measured_us = {
        phase: us - min(tolls_us[phase], MOST_TOLL * us) for phase, us in _measured_us(step).items()
    }
    found: dict[str, float] = {}
    for phase in (FORWARD, BACKWARD):
        planned, measured = planned_us[phase], measured_us.get(phase)
        if measured is None or planned <= 0:
            continue
        again = again_us * found.get(FORWARD, 1.0) if phase == BACKWARD else 0.0
        rest = measured - again
        if again and rest <= 0:  # then assume that both are equally slow
            rest, planned = measured, planned + again_us
        found[phase] = rest / planned
    if not found or min(found.values()) <= 0:
        return None
    only = next(iter(found.values()))
    return Factors(found.get(FORWARD, only), found.get(BACKWARD, only))


def with_factors(problem: Problem, factors: Factors | None) -> Problem:
    """The problem with the measured times of its ops; unchanged if `factors` is None."""
    if factors is None:
        return problem

    def scaled(op: Op) -> Op:
        factor = factors.of(op.phase)
        direct = {tensor: us * factor for tensor, us in op.direct.items()}
        return replace(op, duration_us=op.duration_us * factor, direct=direct)

    return replace(problem, ops=tuple(map(scaled, problem.ops)))


def corrected(problem: Problem, machine: Machine, plan: Plan, factors: Factors) -> Corrected | None:
    """Simulates the plan with these costs and `machine`'s lanes; None if it would not run."""
    timeline = Simulator(with_factors(problem, factors), machine).run(plan, record=False)
    return Corrected(timeline.cost_us, factors) if timeline.valid else None


def _measured_us(step: MeasuredStep) -> dict[str, float]:
    """Half → its measured time without waits."""
    halves = {s.id: s for s in step.spans if s.lane == COMPUTE}
    found = {}
    for phase, span in halves.items():
        waited = sum(w.duration_ns for w in step.waits if span.start_ns <= w.start_ns < span.end_ns)
        found[phase] = max(0, span.end_ns - span.start_ns - waited) / 1000
    return found


def _tolls_us(problem: Problem, plan: Plan, timeline: Timeline) -> dict[str, float]:
    """Half → time that moves take from its ops, in proportion to their time in flight in it."""
    spans = settled_spans(timeline)
    backward = (o.id for o in problem.ops if o.phase != FORWARD)
    turn_ns = min((spans[o].start_ns for o in backward if o in spans), default=sys.maxsize)
    moves = [spans[m.id] for m in plan.moves if m.id in spans]
    whole_ns = sum(s.end_ns - s.start_ns for s in moves)
    early_ns = sum(max(0, min(s.end_ns, turn_ns) - s.start_ns) for s in moves)
    early_us = timeline.toll_us * early_ns / whole_ns if whole_ns else 0.0
    return {FORWARD: early_us, BACKWARD: timeline.toll_us - early_us}


def _planned_us(problem: Problem, plan: Plan, timeline: Timeline) -> tuple[dict[str, float], float]:
    """Half → planned time of its device ops, and that of forward recomputations in backward."""
    planned, again_us = {FORWARD: 0.0, BACKWARD: 0.0}, 0.0
    recomputes = {r.id: r for r in plan.recomputes}
    for span in settled_spans(timeline).values():
        if span.lane != COMPUTE:
            continue
        us = (span.end_ns - span.start_ns) / 1000
        known = recomputes.get(span.id)
        phase = problem.op[known.before if known else span.id].phase
        if known and problem.op[known.op].phase == FORWARD != phase:
            again_us += us
        else:
            planned[FORWARD if phase == FORWARD else BACKWARD] += us
    return planned, again_us
