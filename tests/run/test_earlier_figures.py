"""Figures that steps have shown count as those that an earlier process has found, if they are
nearly the same: what follows from them is found in the caches."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from test_report import MACHINE, PROBLEM, made
from test_trial import FEW, Run, as_planned

from offcompile.ir import Drop, Plan, Problem
from offcompile.planning import plan_cache
from offcompile.planning.feedback.corrections import SAME, Factors
from offcompile.planning.feedback.earlier_figures import (
    DRIFT,
    MOST_KEPT,
    Figures,
    as_found_before,
)
from offcompile.planning.feedback.lane_watch import MARGIN
from offcompile.planning.feedback.measured import MeasuredStep
from offcompile.planning.feedback.profiling import LONGER_GAINS, reconsider
from offcompile.planning.feedback.sparsity import Packability
from offcompile.planning.fit_budget import Decided
from offcompile.planning.planner import Beaten
from offcompile.report.report import PlanReport

BUSY = Figures(Factors(1.4, 1.3), False, {"d2h": 800.0}, {"a": 0.5})


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    found = tmp_path / "cache"
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(found))
    monkeypatch.setattr(plan_cache, "WORTH_KEEPING_SECONDS", 0.0)
    return found


def found(now: Figures, plan: Plan | None = None, planner: str = "planner") -> Figures:
    return as_found_before(now, PROBLEM, MACHINE, plan or Plan(), planner)


@pytest.mark.parametrize(
    ("change", "equal"),
    [
        ({"factors": Factors(1.4 * SAME * 0.99, 1.3 / SAME * 1.01)}, True),
        ({"factors": Factors(1.4 * SAME * 1.01, 1.3)}, False),
        ({"factors": Factors(1.4, 1.3 / SAME * 0.99)}, False),
        ({"factors": None}, False),
        ({"includes_touching": True}, False),
        ({"rates": {"d2h": 800.0 * MARGIN * 0.99}}, True),
        ({"rates": {"d2h": 800.0 / MARGIN * 0.99}}, False),
        ({"rates": {}}, False),
        ({"densities": {"a": 0.5 + 0.9 * DRIFT}}, True),
        ({"densities": {"a": 0.5 - 1.1 * DRIFT}}, False),
        ({"densities": {}}, False),
    ],
)
def test_figures_that_are_nearly_the_same_count_as_the_earlier_ones(
    change: dict[str, object], equal: bool
) -> None:
    assert found(BUSY) == BUSY
    now = replace(BUSY, **change)  # type: ignore[arg-type]
    assert found(now) == (BUSY if equal else now)


def test_a_lane_near_its_own_rate_is_as_fast_as_one_with_that_rate() -> None:
    near = Figures(rates={"d2h": MACHINE.lane["d2h"].bytes_per_us * 0.9})
    assert found(near) == near and found(Figures()) == near


def test_the_nearest_figures_count_and_other_plans_and_planners_have_their_own() -> None:
    near, far = (replace(BUSY, factors=Factors(f, 1.3)) for f in (1.5, 1.75))
    assert (found(far), found(near)) == (far, near)
    assert found(replace(BUSY, factors=Factors(1.6, 1.3))) == near
    assert found(replace(BUSY, factors=Factors(1.65, 1.3))) == far
    assert found(BUSY, planner="another") == BUSY
    assert found(BUSY, Plan(drops=(Drop("x", "device", "ba"),))) == BUSY


def test_only_the_newest_are_kept() -> None:
    states = [replace(BUSY, factors=Factors(2.0**n, 1.3)) for n in range(MOST_KEPT + 1)]
    assert list(map(found, states)) == states
    again = [replace(f, densities={"a": 0.51}) for f in states]
    assert found(again[1]) == states[1] and found(again[0]) == again[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"factors": {"forward": -1.0, "backward": 1.0}},
        {"factors": {"forward": 1.0}},
        {"factors": [1.0, 1.0]},
        {"includes_touching": 0},
        {"rates": {"d2h": "fast"}},
        {"rates": None},
        {"densities": {"a": 2.0}},
        {"densities": {"a": float("nan")}},
    ],
)
def test_damaged_figures_count_as_absent(folder: Path, damage: dict[str, object]) -> None:
    found(BUSY)
    (path,) = folder.glob("figures-*.json")
    whole = json.loads(path.read_text())
    whole["content"]["figures"][0] |= damage
    path.write_text(json.dumps(whole))
    now = replace(BUSY, densities={"a": 0.51})
    assert found(now) == now


def judged(plan: Callable[..., Decided]) -> tuple[str, float, bool]:
    """What is said of a plan that costs so much, and if another one is taken."""
    report = made()
    facts = Packability({}, {}, None)
    told = reconsider(report.problem, report.plan, report.machine, facts, 0.03, plan, "costs")
    return told[0], report.result.cost_us, told[1] is not None


def test_a_search_ends_early_where_no_plan_can_gain_enough() -> None:
    asked: list[float] = []

    def beaten(problem: Problem, worth_us: float, shortly: bool) -> Decided:
        asked.append(worth_us)
        raise Beaten

    text, cost_us, taken = judged(beaten)
    assert text == "no plan for these costs gains 3% of a step: the plan stays" and not taken
    assert asked == [pytest.approx(0.97 * cost_us)]


@pytest.mark.parametrize(("near", "searches"), [(1.01, [True, False]), (0.99, [True])])
def test_a_long_search_follows_a_short_one_that_came_near(
    near: float, searches: list[bool]
) -> None:
    asked: list[bool] = []

    def plan(problem: Problem, worth_us: float, shortly: bool) -> Any:
        asked.append(shortly)
        cost_us = worth_us * LONGER_GAINS / near if shortly else worth_us * 0.99
        return SimpleNamespace(result=SimpleNamespace(cost_us=cost_us))

    text, _, taken = judged(plan)
    assert asked == searches
    assert taken == (len(searches) == 2) and ("it is taken" in text) == taken


# -- a model whose steps are made up ---------------------------------------------------------------


def trained(
    tmp_path: Path, times: Callable[[int, PlanReport], MeasuredStep], **more: object
) -> tuple[list[PlanReport], int]:
    """The reports, and the number of searches."""
    searching = mock.Mock(side_effect=plan_cache.plan_asked)
    with (
        pytest.MonkeyPatch.context() as patch,
        mock.patch.object(plan_cache, "plan_asked", searching),
    ):
        run = Run(tmp_path, patch, **more)
        run.times = times
        run.steps(2 * FEW + 2)
        return run.reports, searching.call_count


def slower(times: float) -> Callable[[int, PlanReport], MeasuredStep]:
    """Only the first plan's ops differ from their costs."""
    return lambda n, report: as_planned(report, times if n == 0 else 1.0)


def test_a_plan_for_what_was_measured_is_found_again_by_a_later_process(tmp_path: Path) -> None:
    (_, second), searched = trained(tmp_path, slower(0.25))
    assert searched and not second.result.reused
    (_, again), none = trained(tmp_path, slower(0.26))
    assert none == 0 and again.result.reused
    assert again.plan == second.plan and again.problem == second.problem
    assert again.profile is not None and "0.26 ×" in again.profile.said[-1]


@pytest.mark.parametrize(("times", "more"), [(0.4, {}), (0.26, {"reuse_plans": False})])
def test_other_figures_and_reuse_plans_false_are_searched_for_anew(
    tmp_path: Path, times: float, more: dict[str, object]
) -> None:
    trained(tmp_path, slower(0.25))
    (first, second), searched = trained(tmp_path, slower(times), **more)
    assert searched
    for before, after in zip(first.problem.ops, second.problem.ops, strict=True):
        assert after.duration_us == pytest.approx(before.duration_us * times, rel=1e-3)
