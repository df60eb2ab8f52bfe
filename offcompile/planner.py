"""The documented path of `offcompile.planning.planner`."""

from offcompile.planning.planner import (
    BOUND_SHARE,
    COARSEN_ABOVE_OPS,
    KEEPING_SECONDS,
    LEAST_SEARCH_SECONDS,
    Beaten,
    CheckResult,
    PlanResult,
    certify,
    check_plan,
    judge_for,
    plan_problem,
)

__all__ = [
    "BOUND_SHARE",
    "COARSEN_ABOVE_OPS",
    "KEEPING_SECONDS",
    "LEAST_SEARCH_SECONDS",
    "Beaten",
    "CheckResult",
    "PlanResult",
    "certify",
    "check_plan",
    "judge_for",
    "plan_problem",
]
