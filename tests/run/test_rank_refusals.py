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
