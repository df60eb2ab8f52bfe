"""A graph that one rank refuses is refused on all, in the same words, before anyone waits."""

from __future__ import annotations

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

WRAPS = ["inside", "whole", "fsdp"]


def test_all_ranks_raise_what_one_has_raised() -> None:
    fits, refuses = pair_of_ranks.start("rank_refusal_child.py", WRAPS)
    assert [found["wrap"] for found in refuses] == WRAPS
    for here, there in zip(fits, refuses, strict=True):
        assert there["kind"] == here["kind"] == "Infeasible"
        assert there["needed"] == here["needed"]
        assert here["text"] == f"On rank 1: {there['text']}"


@pytest.mark.long
def test_the_first_op_that_differs_is_named() -> None:
    (here,), (there,) = pair_of_ranks.start("rank_refusal_child.py", ["differ"])
    (said,) = here["said"]
    assert "Graph 1 of rank 1 first differs at `%sigmoid" in said
    assert "where this rank has `%relu" in said
    assert len(there["said"]) == 1
    assert here["gradients"] == there["gradients"]  # reduced all the same
