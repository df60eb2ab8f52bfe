"""Plans a whole training step of several graphs as one problem."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from offcompile.ir import Infeasible, Machine, Problem
from offcompile.ir.units import show_bytes
from offcompile.passes.step.record import RecordedStep
from offcompile.passes.step.stitch import StitchedStep, stitch
from offcompile.passes.step.table import StepTable, table_of
from offcompile.planning.fit_budget import US_PER_S, planning_seconds
from offcompile.planning.planner import PlanResult, plan_problem

#: share of a step that may be spent on searching its plan: the forward and backward plans that it
#: joins are made already, and moves between graphs are few
SEARCH_SHARE = 1 / 100
LEAST_SEARCH_S = 0.02

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PlannedStep:
    """A stitched step and the plan that was made of it, legal by the verifier."""

    stitched: StitchedStep
    machine: Machine
    result: PlanResult

    @property
    def table(self) -> StepTable:
        return table_of(self.stitched, self.result.plan)


@dataclass(eq=False)
class StepPlanner:
    """Plans the steps of one keeper. `machine_for`: the machine with so much device memory."""

    machine_for: Callable[[int], Machine]
    #: the newest plan
    planned: PlannedStep | None = field(default=None)

    def __call__(self, step: RecordedStep) -> StepTable | None:
        """Plan a step. None if no plan fits: then the keeper goes on graph by graph."""
        try:
            self.planned = plan_step(step, self.machine_for)
        except Infeasible as error:
            log.info("the graphs of a step are not planned together: %s", error)
            return None
        table = self.planned.table
        log.info(
            "%d graph executions planned as one step: %s leave the device of %s saved between them",
            len(step.executions),
            show_bytes(table.moved_bytes),
            show_bytes(sum(map(step.nbytes, step.wanted))),
        )
        return table


def plan_step(step: RecordedStep, machine_for: Callable[[int], Machine]) -> PlannedStep:
    """Stitch a step and plan it. Raises `Infeasible`."""
    stitched = stitch(step)
    machine = machine_for(stitched.capacity_bytes)
    problem = stitched.problem
    result = plan_problem(problem, machine, seconds=_search_seconds(problem))
    return PlannedStep(stitched, machine, result)


def _search_seconds(problem: Problem) -> float:
    step_s = sum(op.duration_us for op in problem.ops) / US_PER_S
    return min(planning_seconds(problem), max(LEAST_SEARCH_S, SEARCH_SHARE * step_s))
