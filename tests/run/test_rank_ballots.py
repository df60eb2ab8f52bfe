"""Two ranks change their plan at one step, for what rank 0 has seen of its steps."""

from __future__ import annotations

from typing import Any

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed"),
    pytest.mark.long,
]

#: plans that there are after each step: rank 0 judges measured times at the eighth call
STAYS, CHANGES = [1] * 10, [1] * 7 + [2] * 3
#: how the model is wrapped, what each rank sees, its budget, and when there is another plan
CASES: list[tuple[str, list[str | None], list[str], list[int]]] = [
    ("ddp", ["ops", None], ["7MiB", "7MiB"], CHANGES),
    ("fsdp", ["lanes", None], ["8MiB", "7MiB"], CHANGES),
    # rank 1 alone sees something; rank 0 computes in half the time that the plan, made for rank 1,
    # gives it, and knows that
    ("ddp", [None, "ops"], ["7MiB", "8MiB"], STAYS),
]


@pytest.fixture(scope="module")
def found() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    asked = [case[:3] for case in CASES]
    return list(zip(*pair_of_ranks.start("rank_ballot_child.py", asked), strict=True))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_ranks_come_to_another_plan_together(
    found: list[tuple[dict[str, Any], dict[str, Any]]], number: int
) -> None:
    *_, planned = CASES[number]
    here, there = found[number]
    for rank in (here, there):
        assert rank["equal"]  # bit for bit the plain run
        assert rank["planned"] == planned
        assert rank["said"] == []
        assert any(plan["moves"] for plan in rank["plans"])
    assert here["plans"] == there["plans"]
    assert here["durations"] == there["durations"] and here["rates"] == there["rates"]
    assert (here["searched"], there["searched"]) == (planned[-1], 0)
    if planned == CHANGES:
        before, after = here["plans"]
        assert before != after


def test_another_plan_is_still_for_the_slowest_rank(
    found: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    """The change that rank 0 sees in its ops or lanes is taken to hold for all ranks."""
    (ops, _), (lanes, _), (stays, _) = found
    assert ops["rates"] == [[250.0, 250.0], [250.0, 250.0]]
    assert lanes["rates"] == [[250.0, 250.0], [62.5, 62.5]]
    before, after = (sum(times) for times in ops["durations"])
    assert before / after == pytest.approx(4, rel=0.15)  # latencies are no faster on rank 0
    before, after = (sum(times) for times in lanes["durations"])
    assert before == after
    assert not any("times" in line or "×" in line for line in stays["profile"])
