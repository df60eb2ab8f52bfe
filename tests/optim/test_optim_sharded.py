"""States that are shared out over ranks: bit for bit the run in which each rank has all of them."""

from __future__ import annotations

from typing import Any

import pair_of_ranks
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from offcompile import InvalidInput, optim
from offcompile.optim.ranks.partition import (
    RANGE_BYTES,
    TOGETHER_BYTES,
    ElementRange,
    Outline,
    parcels,
    partition,
)

on_ranks = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

#: on the host, or in memory, where no store pads its sizes
TRAINED = ["host", "clipped", "held_back", "masters", "sgd", "muon", "of_others", "groups"]
#: states that a rank has at most, as a share of all
MOST = 0.55


def run(names: list[str], world: int = 2, may_fail: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """The findings of each rank, by case."""
    found = pair_of_ranks.start("rank_sharded_child.py", [world, names], world, may_fail)
    return [dict(zip(names, rank, strict=False)) for rank in found]


# -- who owns what ---------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 1 << 40), max_size=40)


@given(SIZES, st.integers(1, 9))
def test_no_share_is_larger_than_another_by_more_than_one_parameter(
    sizes: list[int], ranks: int
) -> None:
    owners = partition(sizes, [0] * ranks)
    loads = [0] * ranks
    for size, owner in zip(sizes, owners, strict=True):
        loads[owner] += size
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_parameters_that_come_later_go_to_the_rank_that_has_less() -> None:
    assert partition([5, 4, 3, 3], [0, 0]) == [0, 1, 1, 0]
    assert partition([3, 3], [8, 1]) == [1, 1]


@given(
    st.lists(
        st.builds(
            Outline,
            owner=st.integers(0, 2),
            kind=st.sampled_from(["float32", "bfloat16"]),
            numel=st.one_of(st.integers(0, 9), st.integers(0, 3 * RANGE_BYTES)),
            itemsize=st.sampled_from([2, 4]),
        ),
        max_size=12,
    )
)
def test_parcels_hold_each_element_once_from_one_owner_and_of_one_kind(
    tensors: list[Outline],
) -> None:
    found = parcels(tensors)
    for parcel in found:
        of = [tensors[piece.position] for piece in parcel]
        assert len({(t.owner, t.kind) for t in of}) == 1
        nbytes = sum((p.stop - p.start) * t.itemsize for p, t in zip(parcel, of, strict=True))
        assert 0 < nbytes <= (TOGETHER_BYTES if len(parcel) > 1 else RANGE_BYTES)
    ends = [0] * len(tensors)
    for piece in (piece for parcel in found for piece in parcel):
        assert piece.start == ends[piece.position]
        ends[piece.position] = piece.stop
    assert ends == [t.numel for t in tensors]


def test_owners_take_turns() -> None:
    small = [Outline(owner, "float32", 4, 4) for owner in (0, 0, 1)]
    large = Outline(0, "float32", RANGE_BYTES // 4 + 1, 4)
    assert parcels([large, *small]) == [
        (ElementRange(0, 0, RANGE_BYTES // 4),),
        (ElementRange(3, 0, 4),),
        (ElementRange(0, RANGE_BYTES // 4, RANGE_BYTES // 4 + 1),),
        (ElementRange(1, 0, 4), ElementRange(2, 0, 4)),
    ]


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"sharded": True}, "call torch.distributed.init_process_group() first"),
        ({"sharded": 2}, "sharded=2 is not possible: give True or False"),
        ({"process_group": "a group"}, "with sharded=True only"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        optim.AdamW([torch.nn.Parameter(torch.ones(2))], **asked)
    assert says in str(refused.value)


# -- on ranks --------------------------------------------------------------------------------------


def check_trained(rank: dict[str, Any], most: float) -> None:
    for case in TRAINED:
        found = rank[case]
        assert (found["weights"], found["states"], found["norm"]) == (True, True, True), case
        assert 0 < found["share"] <= most, (case, found)
        assert 0 < found["updated"] < found["of"], case


@pytest.mark.long
@on_ranks
def test_two_ranks_train_as_without_and_keep_half_of_the_states() -> None:
    ranks = run([*TRAINED, "disk"])
    for rank in ranks:
        check_trained(rank, MOST)
        assert rank["disk"]["weights"] and rank["disk"]["states"]
    for case in TRAINED:
        assert sum(rank[case]["updated"] for rank in ranks) == ranks[0][case]["of"]
        assert sum(rank[case]["share"] for rank in ranks) == pytest.approx(1, abs=0.01)


@on_ranks
@pytest.mark.soak
def test_three_ranks_train_as_without() -> None:
    for rank in run(TRAINED, world=3):
        check_trained(rank, 0.46)  # by whole parameters, of which there are few


@pytest.mark.long
@on_ranks
def test_owners_update_inside_a_compiled_backward() -> None:
    ranks = [rank["compiled"] for rank in run(["compiled"])]
    assert all(rank["weights"] for rank in ranks)
    assert sum(rank["updated"] for rank in ranks) == ranks[0]["of"] == 20
    # and an update that fails there is told in step()
    assert "Rank 1 has failed in step()" in ranks[0]["raised"]
    assert all("no space" in rank["raised"] and rank["equal"] for rank in ranks)


@on_ranks
def test_checkpoints_go_to_any_number_of_ranks() -> None:
    ranks = [rank["resumed"] for rank in run(["resumed"])]
    kept = [rank.pop("has") for rank in ranks]
    assert all(all(rank.values()) for rank in ranks), ranks
    assert [whole for _, whole, _ in kept] == [20, 20]
    assert all(own + elsewhere == 20 for own, _, elsewhere in kept)


@on_ranks
def test_errors_name_what_differs_and_who_is_missing() -> None:
    first, second = (rank["refusals"] for rank in run(["refusals"]))
    for said in (first, second):
        assert "the first that does is [nothing] on rank 0" in said["parameters"]
        assert "[parameter 20 of shape (3, 3), strides" in said["parameters"]
        assert "max_exp_avg_sq" in said["arguments"]
        assert "leave out sharded=True" in said["DTensor"]
        assert "wrap the model in DistributedDataParallel" in said["reduced by nobody"]
        assert (
            "Rank 0 has called state_dict() while rank 1 has called discard()" in said["mixed up"]
        )
        assert "save its state_dict() on every rank" in said["pickled"]
        assert "load what this rank has saved" in said["of another"]
    assert "no space" in first["failed"]
    assert "Rank 0 could not take part: OSError: [Errno 28] no space" in second["failed"]
    assert "rank 1 did not come" in first["alone"]


@on_ranks
def test_a_rank_that_fails_in_step_is_named_on_the_others() -> None:
    first, second = (rank["failing"] for rank in run(["failing"]))
    assert "Rank 1 has failed in step()" in first["raised"]
    assert "No space left on device" in first["raised"]
    assert second["raised"].startswith("OSError")
    for said in (first, second):
        assert "discard()" in said["again"]
        assert said["equal"]


@on_ranks
def test_a_rank_that_dies_in_step_is_named_on_the_others() -> None:
    first, _ = run(["dying"], may_fail=(1,))
    assert "Rank 1" in first["dying"]["said"] and "has died" in first["dying"]["said"]
