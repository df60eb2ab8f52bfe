"""Plans a whole training step of several graphs as one problem.

Once it is known how much room the graphs of a step leave, the planner also tries to let them save
less: if cheap ops run again in backward, fewer bytes have to leave and come back. A graph that
should save less is planned again at its next call. If steps then take longer than before, by the
clock, graphs go back to the plans that they had.
"""

from __future__ import annotations

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import cast

from offcompile.ir import Infeasible, Machine, Problem
from offcompile.ir.units import show_bytes
from offcompile.passes.step.lighter import Lighter, lightened
from offcompile.passes.step.record import RecordedStep
from offcompile.passes.step.stitch import StitchedStep, stitch
from offcompile.passes.step.table import StepTable, table_of
from offcompile.planning.fit_budget import US_PER_S, planning_seconds
from offcompile.planning.planner import PlanResult, plan_problem

from .usage import ParameterSet

#: share of a step that may be spent on searching its plan: the forward and backward plans that it
#: joins are made already, and moves between graphs are few
SEARCH_SHARE = 1 / 100
LEAST_SEARCH_S = 0.02
#: graphs are planned again in order to save less only if a step gains this share of its time
LIGHTER_GAIN = 1 / 200
#: shares of the graphs, from the first of the step on, that are tried: what the first ones save
#: waits longest for its backward
SHARES = (3 / 4, 1 / 2, 1 / 4)

#: steps that are timed before and after, and the factor by which they may take longer: on a shared
#: machine, steps vary by some percent
TIMED_STEPS, LOSES = 6, 1.1

US_PER_MS = 1000
#: begins the phase of a gap that counts as an execution (`outside`)
AFTER = "after "
#: the name of an execution: graph, phase, parameters and sizes
Ran = tuple[str, str, ParameterSet, tuple[int, ...]]
_Choice = dict[ParameterSet, Lighter]

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
    #: the graphs that save less
    _lighter: Sequence[ParameterSet] = ()
    #: the steps before they did, in us; None: that was not decided yet, or is no longer in question
    _usual_us: float | None = None
    _decided: bool = False
    #: the last steps that kept to their table
    _steps_us: deque[float] = field(default_factory=lambda: deque(maxlen=TIMED_STEPS))
    _began_us: float = 0.0
    _kept: int = 0

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
            graph_runs(step),
            show_bytes(table.moved_bytes),
            show_bytes(sum(map(step.nbytes, step.wanted))),
        )
        return table

    def save_less(self, step: RecordedStep) -> None:
        """Have graphs planned again so that they save less for backward, if that is faster."""
        graphs = _Graphs.of(step)
        if self._decided or any(parameters.ns_per_byte for parameters in graphs.ways):
            return
        now_us = self._cost_us(step)
        best, best_us = _Choice(), now_us * (1 - LIGHTER_GAIN)
        for choice in graphs.at_prices():
            made_us = self._cost_us(step, graphs.at(choice), best_us)
            best, best_us = (choice, made_us) if made_us < best_us else (best, best_us)
        for share in SHARES if best else ():
            choice = dict(list(best.items())[: math.ceil(share * len(best))])
            made_us = self._cost_us(step, graphs.at(choice), best_us)
            best, best_us = (choice, made_us) if made_us < best_us else (best, best_us)
        for parameters, way in best.items():
            parameters.ns_per_byte = way.ns_per_byte
        if best:
            self._decided, self._lighter = True, tuple(best)
            self._usual_us = statistics.median(self._steps_us) if self._steps_us else None
            self._steps_us.clear()
            log.info(
                "a step should take %.1f ms instead of %.1f if %d of %d graphs save less for"
                " backward and run ops again: they are planned anew",
                best_us / US_PER_MS,
                now_us / US_PER_MS,
                len(best),
                len(graphs.forwards),
            )

    def step_over(self, now_us: float, kept: int) -> None:
        """Note that a step begins. kept: the number of steps that have kept to their table."""
        if kept > self._kept:
            self._steps_us.append(now_us - self._began_us)
        self._began_us, self._kept = now_us, kept
        if self._usual_us is None or len(self._steps_us) < TIMED_STEPS:
            return
        usual_us, lighter_us = self._usual_us, statistics.median(self._steps_us)
        self._usual_us = None
        if lighter_us > usual_us * LOSES:
            for parameters in self._lighter:
                parameters.ns_per_byte = 0.0
            log.info(
                "steps take %.1f ms where graphs save less for backward, and took %.1f before: they"
                " go back to the plans that they had",
                lighter_us / US_PER_MS,
                usual_us / US_PER_MS,
            )

    def _cost_us(
        self,
        step: RecordedStep,
        ways: Mapping[int, Lighter] = MappingProxyType({}),
        worth_us: float = float("inf"),
    ) -> float:
        """The cost of a step whose forwards at these positions save less; infinite if there is no
        plan, or if the ops alone take `worth_us`."""
        step = lightened(step, ways)
        if sum(m.duration_us for m in step.measured) + step.after_us >= worth_us:
            return float("inf")
        try:
            return plan_step(step, self.machine_for).result.cost_us
        except Infeasible:
            return float("inf")


@dataclass(frozen=True)
class _Graphs:
    """The graphs of a step, each with the weights it runs with, in the order of their forwards."""

    #: the positions of their forwards
    forwards: Mapping[ParameterSet, list[int]]
    #: the ways of those that could save less
    ways: Mapping[ParameterSet, Sequence[Lighter]]

    @classmethod
    def of(cls, step: RecordedStep) -> _Graphs:
        forwards: dict[ParameterSet, list[int]] = {}
        for at, run in enumerate(step.executions):
            if not run.backward and run.saved:
                _, _, parameters, _ = cast("Ran", run.name)
                forwards.setdefault(parameters, []).append(at)
        return cls(forwards, {parameters: _ways_of(parameters) for parameters in forwards})

    def at(self, choice: _Choice) -> dict[int, Lighter]:
        """The ways chosen, by the positions of their forwards."""
        return {p: way for parameters, way in choice.items() for p in self.forwards[parameters]}

    def at_prices(self) -> Iterator[_Choice]:
        """For each price at which another way is chosen, the ways chosen."""
        prices = {way.ns_per_byte for ways in self.ways.values() for way in ways}
        for price in sorted(prices):
            chosen = _Choice()
            for parameters, ways in self.ways.items():
                cheap = [way for way in ways if way.ns_per_byte <= price]
                if cheap:
                    chosen[parameters] = cheap[-1]
            yield chosen


def graph_runs(step: RecordedStep) -> int:
    """The number of executions that are runs of graphs, and not gaps between them."""
    return sum(not cast("Ran", name)[1].startswith(AFTER) for name in step.names)


def _ways_of(parameters: ParameterSet) -> Sequence[Lighter]:
    ask = parameters.lighter()
    return () if ask is None else ask()


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
