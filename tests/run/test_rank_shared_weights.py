"""Weights on the host once for two ranks: bit for bit the run in which each rank has its own."""

from __future__ import annotations

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pair_of_ranks
import pytest
import torch.distributed as dist

pytestmark = pytest.mark.skipif(
    not dist.is_available() or sys.platform != "linux", reason="ranks, and files in /proc"
)

TRAINED = ["plain", "clipped", "masters", "compiled"]
WRITTEN = ["one_writes", "all_write", "loaded", "looked_at", "given_up"]
#: weights of the model that a plan puts on the host
HOSTED = 4


@cache
def run(*names: str) -> tuple[dict[str, Any], ...]:
    """The findings of each rank, by case."""
    found = pair_of_ranks.start("rank_shared_child.py", [2, names], 2)
    return tuple(dict(zip(names, rank, strict=True)) for rank in found)


@pytest.mark.long
def test_ranks_train_as_with_weights_of_their_own() -> None:
    for rank in run(*TRAINED):
        for case in TRAINED:
            assert rank[case]["equal"], case
            assert set(rank[case]["common"]) == {HOSTED}, case
            assert rank[case]["apart"] == 0
        (said,) = rank["plain"]["said"]
        assert said.startswith(f"{HOSTED} weights on the host, 1.0 MiB, are there once for the 2")


def test_weights_that_nobody_updates_are_shared_if_they_are_equal() -> None:
    first, second = (rank["frozen"] for rank in run("frozen"))
    assert first["equal"] and second["equal"]
    # rank 0 writes to one of them in the third step, which then has memory of its own there
    assert first["common"] == [HOSTED - 1, HOSTED - 1, HOSTED - 2, HOSTED - 2]
    assert second["common"] == 4 * [HOSTED - 1]


def test_writes_of_the_program_stay_on_their_rank() -> None:
    first, second = run(*WRITTEN)
    for rank in (first, second):
        assert all(rank[case]["equal"] for case in WRITTEN), rank
        assert rank["one_writes"]["in common"] == HOSTED and rank["one_writes"]["kept"]
        # a weight is in common again after the next update, unless it is written to each time
        assert rank["loaded"]["common"] == 6 * [HOSTED]
        assert rank["all_write"]["common"][:2] == 2 * [HOSTED]
        assert rank["all_write"]["common"][-1] == 0
        # one that the program looks at stays where it is looked at
        assert rank["looked_at"]["common"] == 5 * [HOSTED - 1] and rank["looked_at"]["views"]
        assert rank["given_up"]["common"] == HOSTED
        assert rank["given_up"]["raised"] == rank["given_up"]["said"]
    assert "Rank 1 has failed in step()" in first["given_up"]["raised"]


@pytest.mark.long
def test_the_system_counts_weights_once() -> None:
    first, second = (rank["compiled"] for rank in run(*TRAINED))
    assert first["share"] + second["share"] <= 1.1
    assert sum((first["files"] | second["files"]).values()) <= 1.1
    assert first["in backward"] > 0 and second["in backward"] > 0
    assert first["own"] == second["own"] == 0  # updates in backward took no other memory


def test_ranks_that_cannot_share_keep_their_own() -> None:
    for rank in run("machines", "unreachable", "each_updates"):
        for case, why in (("machines", "on 2 machines"), ("unreachable", "Permission denied")):
            (said,) = rank[case].pop("said")
            assert said.startswith("each rank keeps its own weights on the host: ") and why in said
            assert rank[case] == {"equal": True, "common": [0, 0], "apart": 0}
        assert rank["each_updates"] == {"common": 0, "hosted": HOSTED}


def test_a_rank_that_is_killed_leaves_the_weights_of_the_other_alone() -> None:
    shared = set(os.listdir("/dev/shm")) if Path("/dev/shm").is_dir() else set()
    (found,), _ = pair_of_ranks.start("rank_shared_child.py", [2, ["dying"]], 2, may_fail=[1])
    assert "Rank 1" in found["raised"] and "has died" in found["raised"]
    assert found["kept"] and found["common"] == HOSTED
    if Path("/dev/shm").is_dir():
        assert not {n for n in set(os.listdir("/dev/shm")) - shared if "offcompile" in n}
