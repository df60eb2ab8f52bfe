"""A later process plans a graph as an earlier one has, without comparing the ways again."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from lengths import some
from planned_cases import CASES, trained
from torch import Tensor
from weights_runs import clean_slate

from offcompile.report.report import PlanReport
from offcompile.run.plan import remembered

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
    monkeypatch.setattr(remembered, "_question", lambda planner, problem: "the same")
    planned("masks as bits")
    values, reports, searched = planned("activations")
    assert searched == len(reports)
    plain, *_ = planned("activations", reuse_plans=False)
    assert all(map(torch.equal, values, plain))
