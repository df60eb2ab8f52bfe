"""Plans kept in the cache folder: found again for the same question only, and verified."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import house
import pytest
from chains import bytes_range, chain, link

from offcompile.ir import Infeasible
from offcompile.machine.cost_cache import drop_oldest
from offcompile.planning import plan_cache
from offcompile.planning.fit_budget import PlanSearch, fit_budget
from offcompile.planning.plan_cache import Question, plan_once
from offcompile.planning.planner import Beaten, PlanAsked, PlanResult, plan_asked, plan_problem

PROBLEM = chain([40, 30, 20, 50], [60, 50, 40, 30, 20], [5.0, 8.0, 6.0, 4.0], steady=False)
LEAST, MOST = bytes_range(PROBLEM, link(None, 10.0))
POLICY = "joint:evaluations=20,seconds=60"


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    made: list[str] = []

    def noted(asked: PlanAsked, progress: object = None) -> PlanResult:
        made.append("search")
        return plan_asked(asked)

    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(plan_cache, "plan_asked", noted)
    monkeypatch.setattr(plan_cache, "WORTH_KEEPING_SECONDS", 0.0)
    return made


def question(capacity: int = (LEAST + MOST) // 2) -> Question:
    return Question(PROBLEM, link(capacity, 10.0), POLICY, 60.0)


def documents(folder: Path) -> list[Path]:
    return sorted(folder.glob("plan-*.json"))


def test_a_plan_is_searched_for_once(searches: list[str]) -> None:
    first, again = plan_once(question()), plan_once(question())
    assert len(searches) == 1
    assert (again.plan, again.timeline) == (first.plan, first.timeline)
    assert (again.lower_bound_us, again.bound_method) == (first.lower_bound_us, first.bound_method)
    assert first.plan.moves
    assert not first.reused and again.reused
    assert again.planned_in == f"{first.planned_in} by an earlier run"


@pytest.mark.parametrize(
    "other",
    [
        lambda q: replace(q, machine=link(q.machine.tier["device"].capacity_bytes + 1, 10.0)),
        lambda q: replace(q, problem=replace(q.problem, steady=not q.problem.steady)),
        lambda q: replace(q, policy="joint:evaluations=21,seconds=60"),
        lambda q: replace(q, seconds=59.0),
        lambda q: replace(q, trial=True),
        lambda q: replace(q, worth_us=1e9),
        lambda q: replace(q, known=(plan_problem(q.problem, q.machine, POLICY).plan,)),
    ],
)
def test_another_question_has_another_answer(
    searches: list[str], other: Callable[[Question], Question]
) -> None:
    plan_once(question())
    plan_once(other(question()))
    assert len(searches) == 2


def test_another_planner_searches_again(
    searches: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_once(question())
    monkeypatch.setattr(plan_cache, "planner_digest", lambda: "another")
    plan_once(question())
    assert len(searches) == 2


def test_refusals_are_kept_with_their_figures(searches: list[str]) -> None:
    for _ in range(2):
        with pytest.raises(Infeasible) as caught:
            plan_once(question(LEAST - 7))
        with pytest.raises(Beaten):
            plan_once(replace(question(), worth_us=1.0))
    assert len(searches) == 2
    with pytest.raises(Infeasible) as fresh:
        question(LEAST - 7).answered()
    assert str(caught.value) == str(fresh.value)
    assert caught.value.needed_bytes == fresh.value.needed_bytes is not None


def without_moves(content: dict[str, object]) -> None:
    content["plan"] = {**content["plan"], "moves": []}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.clear(),
        lambda content: content.update(plan=3),
        lambda content: content.update(lower_bound_us="much"),
        lambda content: content.update(infeasible=["no", "bytes", ""]),
        without_moves,
    ],
)
def test_damaged_plans_are_searched_for_again(
    searches: list[str], tmp_path: Path, damage: Callable[[dict[str, object]], None]
) -> None:
    first = plan_once(question())
    (path,) = documents(tmp_path)
    whole = json.loads(path.read_text())
    if "infeasible" in str(damage.__code__.co_consts):
        whole["content"].pop("plan")
    damage(whole["content"])
    path.write_text(json.dumps(whole))
    assert plan_once(question()).plan == first.plan
    assert len(searches) == 2
    plan_once(question())
    assert len(searches) == 2  # mended


def test_a_quick_search_leaves_no_file(
    searches: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "WORTH_KEEPING_SECONDS", 1e6)
    plan_once(question())
    assert len(searches) == 1
    assert not documents(tmp_path)


def test_the_folder_keeps_what_was_used_last(searches: list[str], tmp_path: Path) -> None:
    asked = [question(LEAST + n) for n in range(3)]
    for hours, one in enumerate(asked):
        before = set(documents(tmp_path))
        plan_once(one)
        (new,) = set(documents(tmp_path)) - before
        os.utime(new, (3600.0 * hours, 3600.0 * hours))
    plan_once(asked[0])  # used just now
    sizes = [path.stat().st_size for path in documents(tmp_path)]
    drop_oldest("plan", sum(sizes) - 1)
    assert len(documents(tmp_path)) == 2
    plan_once(asked[0])
    plan_once(asked[2])
    assert len(searches) == 3
    plan_once(asked[1])
    assert len(searches) == 4


def test_budgets_reuse_plans_only_if_asked(searches: list[str]) -> None:
    def fitted(reuses: bool) -> float:
        search = PlanSearch(
            lambda nbytes: link(nbytes, 10.0), lambda nbytes: 0, POLICY, 60.0, reuses=reuses
        )
        return fit_budget(PROBLEM, search, (LEAST + MOST) // 2, may_fit=False).cost_us

    costs = [fitted(reuses) for reuses in (True, True, False)]
    assert len(searches) == 2
    assert costs[0] == costs[1] == costs[2]


def test_a_change_in_any_room_that_planning_uses_makes_kept_plans_obsolete() -> None:
    edges = house.graph(house.modules())
    used, new = set[str](), {plan_asked.__module__}
    while new:
        used |= new
        new = {name for module in new for name in edges.get(module, ())} - used
    rooms = {module.split(".")[1] for module in used}
    # the rest says what a machine is; the question holds the machine itself
    assert rooms - {"machine"} <= set(plan_cache.PLANNER)
