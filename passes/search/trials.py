"""Tries decisions one after the other: builds and judges them, and keeps the best legal plan."""

from __future__ import annotations

from offcompile.ir import Infeasible, Machine, Plan, Problem, Timeline
from offcompile.passes.build.contract import Judge
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.schedule import build


class Trials:
    """Without a judge, the first plan that can be built counts as the best."""

    def __init__(self, problem: Problem, machine: Machine, judge: Judge | None) -> None:
        self.problem, self.machine, self.judge = problem, machine, judge
        self.best: Plan | None = None
        self.best_us = float("inf")
        self.best_timeline: Timeline | None = None
        #: why the last rejected decisions were rejected, in words and as the builder's error
        self.refused = ""
        self.error: Infeasible | None = None
        self._seen: set[Decisions] = set()

    def attempt(self, decisions: Decisions) -> bool:
        """Builds and judges decisions. Returns True if their plan is the best so far."""
        if decisions in self._seen:
            return False
        self._seen.add(decisions)
        try:
            plan = build(self.problem, self.machine, decisions, self.judge)
        except Infeasible as error:
            self.refused, self.error = error.reason, error
            return False
        cost_us, timeline = 0.0, None
        if self.judge is not None:
            timeline = self.judge(self.problem, self.machine, plan)
            if not timeline.valid:
                self.refused = f"The plan stops: {timeline.violations[0]}."
                return False
            cost_us = timeline.cost_us
        if cost_us >= self.best_us:
            return False
        self.best, self.best_us, self.best_timeline = plan, cost_us, timeline
        return True
