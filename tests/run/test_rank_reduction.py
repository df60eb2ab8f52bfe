"""Ranks reduce DDP's gradients inside backward, in an order that no plan changes."""

from __future__ import annotations

from typing import Any

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.long,
]

PARAMETERS, LARGE = 2 + 2 * 5, 1 + 2 * 2


def found(*cases: str, world: int = 2) -> list[dict[str, Any]]:
    ranks = pair_of_ranks.start("rank_reduction_child.py", [world, cases], world)
    return [dict(zip(cases, rank, strict=True)) for rank in ranks]


@pytest.fixture(scope="module")
def two_ranks() -> list[dict[str, Any]]:
    """All cases of two ranks in one pair of processes: they import and compile much alike."""
    return found(
        "overlap",
        "any_optimizer",
        "accumulates",
        "plans_differ",
        "apart",
        "falls_back",
        "refuses",
        "in_flight",
    )


def test_updates_wait_for_the_bucket_and_not_for_the_end_of_backward(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        for budget, run in rank["overlap"].items():
            assert run["equal"], budget
            assert run["exchange"] == "Neighbours"
            assert (run["moved_bytes"] > 0) == (budget != "1GiB"), budget
            assert run["in_backward"] == PARAMETERS
            assert 0 < run["most_bytes"] <= run["limit_bytes"]
            # graphs hand over the large gradients, and autograd the small ones
            assert run["from_graphs"] == LARGE
            assert 0 < run["sent_inside"] < run["sent"]


def test_gradients_are_reduced_while_backward_runs_whoever_updates(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        for budget, run in rank["any_optimizer"].items():
            assert run["equal"], budget
            assert 0 < run["most_bytes"] <= run["limit_bytes"], budget
            assert 0 < run["sent_inside"] < run["sent"], budget
            assert run["graphs"] == 1  # torch has not cut it


def test_the_sum_of_several_batches_is_reduced_while_the_last_is_computed(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        for name, run in rank["accumulates"].items():
            assert run["equal"], name
            assert run["hooked"] or run["sent_inside"] > 0, name


def test_ranks_with_other_plans_or_hooks_do_as_ddp_does(two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank["plans_differ"]["equal"] == [True, True]
        assert rank["apart"] == {"equal": [True, True], "exchange": ["AllReduce"] * 2}
        parts = rank["falls_back"].pop("graphs")
        assert rank["falls_back"] == {"equal": True, "reducer": "Reducer"}
        assert parts > 1  # DDP reduces a bucket while the part before it runs
        unused, late = rank["refuses"]["said"]
        assert "2 parameters got no gradient" in unused
        assert "before its first forward" in late


def test_a_step_shows_copies_to_the_host_while_buckets_are_under_way(
    two_ranks: list[dict[str, Any]],
) -> None:
    for rank in two_ranks:
        seen = rank["in_flight"]
        at = {name: place for place, name in enumerate(seen["order"])}
        together = [
            (copy, bucket)
            for copy in seen["copies"]
            for bucket in seen["buckets"]
            if at[f"{bucket} begins"] < at[f"{copy} begins"]
            and at[f"{copy} ends"] < at[f"{bucket} ends"]
        ]
        assert together, seen["order"]
        assert all(nbytes >= 2**19 for nbytes in seen["buckets"].values())
        assert seen["page"][0] == "compute" and seen["page"][-1] == "reduction"


@pytest.mark.soak
def test_no_budget_changes_a_bit_on_four_ranks() -> None:
    assert [rank["budgets"] for rank in found("budgets", world=4)] == [{"different": 1}] * 4
