"""Plans under other budgets, made from the plan under one."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from lengths import some
from torch import nn

from offcompile.ahead.others import budgets
from offcompile.ahead.others.budgets import BudgetPlan, OtherBudgets, under_other_budgets
from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.ir import Infeasible
from offcompile.machine.options import Options
from offcompile.planning import plan_cache
from offcompile.planning.floors import floor_of, peak_alone, with_reserve
from offcompile.planning.planner import PlanAsked, PlanResult

WIDTH, ROWS = 512, 4096
SECONDS = 0.1


def quiet(text: str) -> None:
    """Nobody listens."""


@cache
def ahead(optimizer: str | None) -> Ahead:
    with torch.device("meta"):
        model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
        rows = torch.zeros(ROWS, WIDTH)
    options = Options.read(
        {"hardware": "rtx4090", "lowering": "aot_eager", "seconds": 0.3, "reuse_plans": False}
    )
    asked = ForecastRequest(model, (rows,), {}, options, torch.sum, optimizer)
    return Ahead.of(asked, quiet)


def between(one: Ahead) -> tuple[int, int]:
    """The floor, and the peak if nothing moves."""
    floor = min(floor_of(p, one.survey.machine) for p in one.variants)
    plain = one.survey.problem(one.graphs).problem
    return with_reserve(floor, one.target.reserve_bytes), peak_alone(plain, one.survey.machine)


def start(one: Ahead, share: float) -> BudgetPlan:
    low, high = between(one)
    budget = int(low + share * (high - low))
    return BudgetPlan(one.candidate(budget, quiet, explains=False), budget)


@pytest.mark.parametrize("optimizer", some([None, "adamw"], "adamw"))
@pytest.mark.parametrize("share", some([0.2, 0.6], 0.2))
def test_plans_keep_other_budgets(optimizer: str | None, share: float) -> None:
    one = ahead(optimizer)
    begun = start(one, share)
    others = OtherBudgets(one, begun.made, begun.budget, SECONDS, quiet)
    low, high = between(one)
    costs = {begun.budget: begun.made.choice.decided.cost_us}
    for other in (0.1, 0.9):
        memory = int(low + other * (high - low))
        made = others.plan(memory)
        assert made.order.peak_bytes + one.target.reserve_bytes(memory) <= memory
        costs[memory] = made.cost_us
    assert costs[max(costs)] <= 1.01 * min(costs.values())


def test_each_budget_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ahead(None)
    begun = start(one, 0.3)
    asked: list[PlanAsked] = []
    plain = plan_cache.plan_asked

    def counted(question: PlanAsked, *given: Any) -> PlanResult:
        asked.append(question)
        return plain(question, *given)

    monkeypatch.setattr(plan_cache, "plan_asked", counted)
    monkeypatch.setattr(one, "candidate", None)  # nothing is planned from scratch
    points = under_other_budgets(one, begun, between(one), SECONDS, quiet)
    assert len(points) == 3  # one share is next to the start
    places = 3
    assert len(asked) <= places * len(points)
    known = begun.made.choice.decided.result.plan
    assert asked and all(question.known[0] is known for question in asked)


def test_without_a_plan_the_middle_is_planned_first() -> None:
    one = ahead(None)
    low, high = between(one)
    points = under_other_budgets(one, None, (low, high), SECONDS, quiet)
    assert points[0].memory_bytes == int(low + budgets.SHARES[0] * (high - low))
    assert {p.memory_bytes for p in points[1:]} <= {
        int(low + share * (high - low)) for share in budgets.SHARES[1:]
    }
    assert len(points) == len(budgets.SHARES)


def test_no_budget_is_between_a_floor_and_a_peak_that_are_one() -> None:
    one = ahead(None)
    assert under_other_budgets(one, start(one, 0.5), (1 << 30, 1 << 30), SECONDS, quiet) == []


def test_below_the_floor_is_refused() -> None:
    one = ahead(None)
    begun = start(one, 0.5)
    others = OtherBudgets(one, begun.made, begun.budget, SECONDS, quiet)
    with pytest.raises(Infeasible):
        others.plan(between(one)[0] // 2)
    assert others.points([between(one)[0] // 2]) == []


def test_time_ends_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    one = ahead(None)
    begun = start(one, 0.5)
    monkeypatch.setattr(budgets, "TABLE_SECONDS", -1.0)
    others = replace(OtherBudgets(one, begun.made, begun.budget, SECONDS, quiet))
    assert others.points([begun.budget // 2]) == []
