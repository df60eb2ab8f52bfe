"""A later process plans a graph as an earlier one has, without comparing the ways again."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lengths import some
from planned_cases import CASES, trained
from torch import Tensor
from weights_runs import clean_slate

from offcompile.ir import HOST, Infeasible
from offcompile.report.report import PlanReport
from offcompile.run import problem_source
from offcompile.run.plan import remembered
from offcompile.run.plan.candidates import Candidate

clean = pytest.fixture(autouse=True)(clean_slate)
#: every run of the tests has these
ALWAYS = ("weights, updated in backward", "masks as bits", "a loss in pieces")


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(remembered, "WORTH_KEEPING_SECONDS", 0.0)
    return tmp_path


def planned(case: str, **more: object) -> tuple[list[Tensor], list[PlanReport], int]:
    """Losses and weights, the reports, and the number of searches."""
    searching = mock.Mock(side_effect=remembered.best_candidate)
    with mock.patch.object(remembered, "best_candidate", searching):
        return *trained(case, **more), searching.call_count


def moves(reports: list[PlanReport]) -> list[object]:
    return [(r.plan, r.planned_us, r.result.lower_bound_us, r.problem, r.memory) for r in reports]


@pytest.mark.parametrize("case", some(CASES, *ALWAYS))
def test_a_graph_is_planned_as_before(case: str) -> None:
    values, reports, searched = planned(case)
    again, found, searched_again = planned(case)
    assert (searched, searched_again) == (len(reports), 0)
    assert moves(found) == moves(reports)
    assert len(again) == len(values) and all(map(torch.equal, again, values))
    assert all(report.result.reused for report in found)
    for before, now in zip(reports, found, strict=True):
        assert (now.splitting is None) == (before.splitting is None)
        if now.splitting is not None and before.splitting is not None:
            assert now.splitting.to_json() == before.splitting.to_json()


def test_nearly_the_same_budget_has_the_same_plan() -> None:
    _, reports, searched = planned("activations", memory=2_100_000)
    _, found, searched_again = planned("activations", memory=2_100_500)
    assert (searched, searched_again) == (len(reports), 0)
    assert [r.plan for r in found] == [r.plan for r in reports]


def test_another_budget_and_reuse_plans_false_search_anew() -> None:
    first = planned("activations")
    for more in ({"memory": "2.1MiB"}, {"reuse_plans": False}):
        _, reports, searched = planned("activations", **more)
        assert searched == first[2]
        assert not any(report.result.reused for report in reports)


@pytest.mark.parametrize(
    "damage",
    [
        {"answer": {"plan": {}}},
        {"answer": {"refused": ["no", None, "more"], "budget_bytes": None}},
        {"splitting": {"pieces": 3}},
        {"answer": None},
    ],
)
def test_what_is_damaged_counts_as_absent(kept: Path, damage: dict[str, object]) -> None:
    values, _, searched = planned("activations")
    for path in kept.glob("candidate-*.json"):
        whole = json.loads(path.read_text())
        whole["content"] |= damage
        path.write_text(json.dumps(whole))
    again, _, searched_again = planned("activations")
    assert searched_again == searched
    assert all(map(torch.equal, again, values))


def test_a_plan_of_another_graph_counts_as_absent(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered._Memory, "question", lambda self: "the same")
    planned("masks as bits")
    values, reports, searched = planned("activations")
    assert searched == len(reports)
    plain, *_ = planned("activations", reuse_plans=False)
    assert all(map(torch.equal, values, plain))


# --- ops that take another time than before -----------------------------------------------------


@pytest.fixture
def slow_down(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Make ops take so many times as long as they do, and every second one a little longer."""
    costs_of_graph = problem_source.costs_of_graph

    def slow(factor: float) -> None:
        def costs(*args: Any) -> dict[str, Any]:
            found = costs_of_graph(*args).items()
            return {
                name: replace(cost, duration_us=cost.duration_us * factor * (1 + i % 2 / 20))
                for i, (name, cost) in enumerate(found)
            }

        monkeypatch.setattr(problem_source, "costs_of_graph", costs)

    return slow


@pytest.mark.parametrize("case", some(CASES, *ALWAYS))
def test_a_plan_is_kept_with_its_new_times(
    case: str, slow_down: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "WORTH", {"aot_eager": 0.99})
    values, reports, searched = planned(case)
    slow_down(3.0)
    again, found, searched_again = planned(case)
    assert (searched, searched_again) == (len(reports), 0)
    assert all(map(torch.equal, again, values))
    for before, now in zip(reports, found, strict=True):
        assert now.plan == before.plan and now.result.reused
        assert now.memory == before.memory
        ops = [sum(op.duration_us for op in r.problem.ops) for r in (before, now)]
        assert ops[1] > 2 * ops[0]
        assert ops[1] <= now.result.lower_bound_us * (1 + 1e-9)
        assert now.planned_us > before.planned_us
    third = planned(case)
    assert third[2] == 0 and moves(third[1]) == moves(found)


def test_it_is_kept_for_a_budget_of_the_next_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "WORTH", {"aot_eager": 0.99})
    _, reports, _ = planned("activations")
    number = remembered._bin
    for more in (-1, 1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(remembered, "_bin", lambda budget, more=more: number(budget) + more)
            _, found, searched = planned("activations")
        assert searched == (0 if more < 3 else len(reports))
        assert [r.plan for r in found] == [r.plan for r in reports]


@pytest.mark.parametrize("gain", [0.02, 0.4])
def test_only_a_plan_that_is_worth_compiling_for_replaces_it(
    gain: float, slow_down: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first process believes that its plan touches much memory again."""
    monkeypatch.setattr(remembered, "WORTH", {"aot_eager": 0.3})
    search = remembered.best_candidate

    def touching(*args: Any) -> Candidate:
        found = search(*args)
        decided = found.choice.decided
        dearer = replace(decided, touching_us=decided.cost_us * gain / (1 - gain))
        return replace(found, choice=replace(found.choice, decided=dearer))

    with mock.patch.object(remembered, "best_candidate", touching):
        trained("activations")
    slow_down(1.01)
    _, reports, searched = planned("activations")
    assert all(report.result.reused is (gain < 0.3) for report in reports)
    assert gain < 0.3 or searched == len(reports)


@pytest.mark.parametrize("case", ["activations", "weights"])
@pytest.mark.parametrize("less", [False, True])
def test_it_is_compared_if_weights_elsewhere_may_be_faster(
    less: bool, case: str, slow_down: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "WORTH", {"aot_eager": 0.9})
    _, reports, _ = planned(case)
    slow_down(1.1)
    monkeypatch.setattr(remembered, "device_us", lambda problem: 0.0)
    monkeypatch.setattr(remembered, "weigh_little", lambda problem, machine: False)
    asked = mock.Mock(return_value=less)
    monkeypatch.setattr(remembered, "may_take_less", asked)
    _, found, searched = planned(case)
    assert searched == (len(reports) if less else 0)
    assert asked.call_count == len(reports)
    for report, call in zip(found, asked.call_args_list, strict=True):
        hosted, elsewhere = (
            any(t.kind == "weight" and t.home == HOST for t in problem.tensors)
            for problem in (report.problem, call.args[0])
        )
        assert elsewhere != hosted


def test_it_is_kept_if_the_search_finds_none_now(
    slow_down: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remembered, "WORTH", {"aot_eager": -1.0})  # always searches
    values, reports, _ = planned("activations")
    slow_down(1.1)
    refused = mock.Mock(side_effect=Infeasible("no order was found", None, "Take more."))
    with mock.patch.object(remembered, "best_candidate", refused):
        again, found = trained("activations")
    assert refused.called and [r.plan for r in found] == [r.plan for r in reports]
    assert all(map(torch.equal, again, values))
