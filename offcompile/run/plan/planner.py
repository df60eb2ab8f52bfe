"""Searches for a plan of one problem, as the request and the options of its graph want it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offcompile.ir import BACKWARD, Machine, Plan, Problem
from offcompile.planning.empty_turn import decide_emptied
from offcompile.planning.fit_budget import (
    Decided,
    Holes,
    decide,
    fits_as_it_is,
    planning_seconds,
)
from offcompile.planning.planned_layout import planned_returns
from offcompile.planning.planner import PlanResult
from offcompile.run.problem_source import ProblemSource
from offcompile.runtime.memory.heap import address_space_is_limited

from .request import PlanRequest

Tell = Callable[[str], None]


def tell_nobody(text: str) -> None:
    """Report no progress."""


@dataclass(frozen=True, eq=False)
class GraphPlanner:
    """Plans problems that `source` makes of one graph."""

    source: ProblemSource
    request: PlanRequest
    tell: Tell = tell_nobody

    def budget(self) -> int | None:
        """Bytes that the options leave this graph; None: as few as possible, found by planning."""
        return self.request.budget(self.source.options, self.source.target.device_bytes)

    def fits(self, problem: Problem) -> bool:
        """True if the step is within the budget with nothing moved."""
        budget = self.budget()
        return budget is not None and fits_as_it_is(problem, self.source.machine, budget)

    def decide(
        self,
        problem: Problem,
        budget: int | None,
        may_fit: bool = False,
        share: float = 1.0,
        offload_gradients: bool = False,
        known: Sequence[Plan] = (),
        worth_us: float = float("inf"),
    ) -> Decided:
        """Search for a plan within the budget. Raises `Infeasible`, and `Beaten` if no plan can
        take less than `worth_us`.

        share: of the usual time. known: plans whose choices are tried. may_fit: see `decide`.
        """
        options, target = self.source.options, self.source.target
        seconds = share * (options.seconds or planning_seconds(problem))
        offload_saved = self.request.kind.offload_saved
        offload_gradients = offload_gradients and any(op.phase == BACKWARD for op in problem.ops)
        if (offload_saved or offload_gradients) and budget is not None:
            return decide_emptied(
                problem,
                self.source.machine,
                budget,
                target.reserve_bytes,
                options.whole_policy,
                seconds,
                self.tell,
                offload_saved,
                offload_gradients,
            )
        return decide(
            problem,
            self.source.machine,
            budget,
            target.reserve_bytes,
            options.whole_policy,
            seconds,
            self.tell,
            self.request.held_bytes,
            None if budget is None else self._holes(problem, budget),
            may_fit,
            known,
            worth_us,
        )

    def _holes(self, problem: Problem, budget: int) -> Holes:
        source = self.source
        room, wanted_bytes = source.target.room(budget), source.target.holes_bytes(budget)
        # costs corrected by measured steps already include it; and if the address space is
        # limited, holes cost no time: a step that finds no place fails
        us_per_mib = source.touch_again_us_per_mib if source.profile.factors is None else 0.0
        if room is None or not us_per_mib or problem.steady or address_space_is_limited():
            return Holes(wanted_bytes)

        def touching_us(machine: Machine, made: PlanResult) -> float:
            found = planned_returns(problem, machine, made.plan, made.timeline, room)
            return found.touched_mib * us_per_mib

        return Holes(wanted_bytes, touching_us)
