"""Ranks reduce DDP's gradients inside backward, in an order that no plan changes."""

from __future__ import annotations

from typing import Any

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

PARAMETERS, LARGE = 2 + 2 * 6, 1 + 2 * 2


def found(*cases: str, world: int = 2) -> list[dict[str, Any]]:
    ranks = pair_of_ranks.start("rank_reduction_child.py", [world, cases], world)
    return [dict(zip(cases, rank, strict=True)) for rank in ranks]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """All cases of two ranks in one pair of processes: they import and compile much alike."""
    return found("overlap", "plans_differ", "falls_back", "refuses")


def test_updates_wait_for_the_bucket_and_not_for_the_end_of_backward(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        for budget, run in rank["overlap"].items():
            assert run["equal"], budget
            assert (run["moved_bytes"] > 0) == (budget != "1GiB"), budget
            assert run["in_backward"] == PARAMETERS
            assert 0 < run["most_bytes"] <= run["limit_bytes"]
        # graphs that move tensors hand over the large gradients, and autograd the small ones
        assert run["from_graphs"] == LARGE
        assert 0 < run["sent_inside"] < run["sent"]


def test_ranks_with_other_plans_or_hooks_do_as_ddp_does(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["plans_differ"]["equal"] == [True, True]
        assert rank["falls_back"] == {"equal": True, "reducer": "Reducer"}
        unused, late = rank["refuses"]["said"]
        assert "2 parameters got no gradient" in unused
        assert "before its first forward" in late


@pytest.mark.soak
def test_no_budget_changes_a_bit_on_four_ranks() -> None:
    assert [rank["budgets"] for rank in found("budgets", world=4)] == [{"different": 1}] * 4
