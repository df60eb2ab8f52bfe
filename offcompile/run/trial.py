"""Judges a plan by its first measured steps.

Once a plan has run a few steps, their measurements show the times of its ops and of the whole step.
Then the costs may be corrected and the step planned again (`profiling`), a plan slower than its
predecessor is given up, and the user is told: one line, and one warning if the measured time is far
from the plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from offcompile.ir.units import show_us, size
from offcompile.planning.feedback.corrections import Factors, corrected, factors_of
from offcompile.planning.feedback.measured import MeasuredStep
from offcompile.report.log import first_time, say, warn
from offcompile.report.report import PlanReport, reports
from offcompile.report.stalls import stall_line
from offcompile.runtime.memory.malloc.advice import HINT, malloc_leaves_holes
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.memory.malloc.places import PLACED_FROM

#: recorded steps of a plan before it is judged: the first of them warms up
STEPS_BEFORE = 6
#: a new plan is given up if its measured step is longer than its predecessor's by this factor
LOSES = 1.1
#: ratios of measured to planned time beyond which the user is warned
SLOWER, FASTER = 1.25, 0.6
#: shorter steps, dominated by call overhead, get no replanning for costs and no warning
LEAST_STEP_NS = 10_000_000
#: recorded steps after which a judged plan is checked again
LOOK_EVERY = 50
#: most attempts to get a plan's measured step before it is judged without
MOST_ASKED = 5
#: trims of free memory per step beyond which they are blamed for a slow step
MANY_TRIMS = 3.0
REFRESH = "`offcompile doctor --refresh` measures lanes again and forgets what ops took"


@dataclass
class Trial:
    """The trial of one captured graph's plans. Call it between steps."""

    #: number of times that this process has returned free memory to the system
    trims: Callable[[], int] = lambda: heap().trims
    #: the plan in use, its recorded steps when first seen, and the trims until then
    _counted: tuple[PlanReport, int, int] | None = None
    #: recorded steps and trims when the large blocks of its steps had got their places
    _placed: tuple[int, int] = (0, 0)
    #: the plan that was judged
    _judged: PlanReport | None = None
    _asked: int = 0
    _look_at: int = 0
    #: the previous plan, and its measured step in ns
    _former: tuple[PlanReport, int] | None = None
    #: number of plans given up for their predecessor
    given_up: int = 0

    def due(self, report: PlanReport, recorded: int) -> MeasuredStep | None:
        """Return the measured step of a plan once it has run often enough, once per plan."""
        if recorded and (self._counted is None or self._counted[0] is not report):
            self._counted = report, recorded, self.trims()
        if report is self._judged:
            self._look_again(report, recorded)
            return None
        if recorded < STEPS_BEFORE:
            if recorded <= PLACED_FROM:
                self._placed = recorded, self.trims()
            return None
        step = report.measured_step
        self._asked += 1
        if step is None and self._asked < MOST_ASKED:
            return None
        self._judged, self._asked, self._look_at = report, 0, recorded + LOOK_EVERY
        return step

    def awaited(self, report: PlanReport) -> bool:
        """True if the plan has yet to run long enough to be judged."""
        return report is not self._judged and not report.fits

    def replaced(self, report: PlanReport) -> None:
        """Note that another plan replaces this one."""
        step = report.measured_step
        self._former = None if step is None else (report, step.step_ns)

    def loses_to(self, report: PlanReport, step: MeasuredStep) -> tuple[PlanReport, str] | None:
        """Return the previous plan and the reason, if its steps were shorter. Once per graph."""
        if self._former is None or self.given_up:
            return None
        former, former_ns = self._former
        self._former = None
        if step.step_ns <= former_ns * LOSES or step.step_ns < LEAST_STEP_NS:
            return None
        self.given_up += 1
        times = f"{show_us(step.step_ns / 1000)} a step, the one before {show_us(former_ns / 1000)}"
        return former, f"{report.name} takes {times}: back to that"

    def factors(self, report: PlanReport, step: MeasuredStep) -> Factors | None:
        """Return the ratios of measured to planned op times; None if unknown or steps too short."""
        found = factors_of(report.problem, report.plan, report.timeline, step)
        if found is None:
            return None
        lanes = None if report.profile is None else report.profile.lanes
        machine = report.machine if lanes is None else lanes.applied(report.machine)
        made = corrected(report.problem, machine, report.plan, found)
        if made is not None:
            report.correct(made)
        return found if step.step_ns >= LEAST_STEP_NS else None

    def tell(self, report: PlanReport, step: MeasuredStep, recorded: int = 0) -> None:
        """Print the one line per process, and warn if the measured time is far from the plan."""
        if report.fits:
            return
        if first_time("a plan that runs"):
            say(_line(report, step))
        what = "planned" if report.foreseen_us == report.planned_us else "predicted"
        _warn_if_far(report, step, report.foreseen_us, what, self._trims_a_step(recorded))

    def pages_go_back(self, recorded: int, trims_a_step: float = 1.0) -> bool:
        """True if pages went back to the system so often in every step, on average, once blocks
        had got their places."""
        first, before = self._placed
        return self.trims() - before >= max(1, trims_a_step * (recorded - first))

    def _trims_a_step(self, recorded: int) -> float:
        if self._counted is None or recorded <= self._counted[1]:
            return 0.0
        _, first, before = self._counted
        return (self.trims() - before) / (recorded - first)

    def _look_again(self, report: PlanReport, recorded: int) -> None:
        if recorded < self._look_at:
            return
        self._look_at = recorded + LOOK_EVERY
        step = report.measured_step
        if step is not None and not report.fits:
            _warn_if_far(report, step, report.predicted_us, "usual")


def _line(report: PlanReport, step: MeasuredStep) -> str:
    now = ""
    if report.corrected is not None and not report.corrected.factors.same:
        times = step.step_ns / 1000 / report.predicted_us
        now = f", {times:.2f} × with ops as they are now"
    others = {r.name.partition(",")[0] for r in reports() if not r.fits}
    others.discard(report.name.partition(",")[0])
    more = f"; {len(others)} more in offcompile.reports()" if others else ""
    return (
        f"{report.name}: a step takes {show_us(step.step_ns / 1000)},"
        f" {step.step_ns / 1000 / report.planned_us:.2f} × planned{now}; the plan is"
        f" {100 * report.gap:.1f}% above the bound; peak {size(report.planned_peak_bytes)} of"
        f" {size(report.budget_bytes)}{more}"
    )


def _warn_if_far(
    report: PlanReport, step: MeasuredStep, than_us: float, what: str, trims: float = 0.0
) -> None:
    times = step.step_ns / 1000 / than_us if than_us > 0 else 1.0
    if step.step_ns < LEAST_STEP_NS or FASTER <= times <= SLOWER:
        return
    if first_time("a plan that is far from reality"):
        went = stall_line(report.stall_rows(step), report.timeline, step)
        warn(
            f"{report.name} takes {show_us(step.step_ns / 1000)} a step, {times:.2f} × the"
            f" {what} {show_us(than_us)} ({went}). {_advice(report, step, times, trims)}"
        )


def _advice(report: PlanReport, step: MeasuredStep, times: float, trims: float) -> str:
    if times < 1:
        return f"This machine is faster than when it was measured: {REFRESH}."
    waiting_ns = sum(stall.duration_ns for stall in report.timeline.stalls)
    computing_ns = round(report.foreseen_us * 1000) - waiting_ns
    if step.waiting_ns - waiting_ns > step.compute_ns - computing_ns:
        return (
            "Lanes are slower than they were measured. Does another program use the disk or much"
            f" of the memory's bandwidth? If not, {REFRESH}."
        )
    if trims >= MANY_TRIMS:
        hint = f" Or else: {HINT}." if malloc_leaves_holes(os.environ) else ""
        return (
            "The budget leaves little room for holes between tensors: free memory went back to the"
            f" system {trims:.0f} times a step and was touched again. A larger `memory` makes that"
            f" less.{hint}"
        )
    return (
        "Computing is slower than it was measured. Does another program use this machine, or has"
        f" the number of threads changed? If not, {REFRESH}."
    )
