"""The independent verifier: recomputes residency and time from the contract alone.

Shares no code with the planner or the simulator, so that neither can vouch for itself.
"""

from __future__ import annotations

from offcompile.ir.errors import Violation
from offcompile.ir.model import Machine, Problem
from offcompile.ir.plan import Plan, Timeline

from .structure import check_structure
from .timeline import check_timeline

__all__ = ["check_structure", "check_timeline", "verify"]


def verify(
    problem: Problem, machine: Machine, plan: Plan, timeline: Timeline | None = None
) -> tuple[Violation, ...]:
    """Returns every rule that the plan breaks; given its timeline, also those broken at run time.

    A timeline that reports violations of its own stopped early, so there is no complete record to
    audit: its own violations are returned.
    """
    found = check_structure(problem, machine, plan)
    if found or timeline is None:
        return found
    return timeline.violations or check_timeline(problem, machine, plan, timeline)
