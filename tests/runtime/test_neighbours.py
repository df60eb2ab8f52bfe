"""Two ranks of one machine add up buckets in each other's memory: here, two threads."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offcompile.ir import OffloadError
from offcompile.runtime.ranks import neighbours
from offcompile.runtime.ranks.buckets import Bucket, cut
from offcompile.runtime.ranks.gradient_reducer import GradientReducer
from offcompile.runtime.ranks.neighbours import (
    BucketPlaces,
    BucketRoom,
    Neighbours,
    OtherSide,
    OwnSide,
)
from offcompile.runtime.states import updates

pytestmark = pytest.mark.skipif(neighbours.why_not() is not None, reason="no unnamed memory files")

LONGEST_S = 60.0


class Pair:
    """The two ends of an exchange, each with buckets of its own, cut alike."""

    def __init__(self, sizes: Sequence[int], cap_bytes: int, dtype: torch.dtype = torch.float32):
        self.parameters = [
            [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes] for _ in "ab"
        ]
        self.buckets = [cut(mine, cap_bytes) for mine in self.parameters]
        room = BucketRoom.of(self.buckets[0], cap_bytes)
        own = [OwnSide(room.nbytes) for _ in "ab"]
        other = [OtherSide(side.address) for side in reversed(own)]
        self.lives = True
        self.ends = [
            Neighbours(mine, sides, room, rank == 0, lambda: self.lives, LONGEST_S)
            for rank, (mine, sides) in enumerate(
                zip(self.parameters, zip(own, other, strict=True), strict=True)
            )
        ]

    def fill(self, rank: int, number: int, values: Tensor) -> Bucket:
        """Give a bucket memory with these values, and send it."""
        bucket = self.buckets[rank][number]
        assert self.ends[rank].give_memory(bucket, is_next=True)
        assert bucket.memory is not None
        bucket.memory.copy_(values)
        self.ends[rank].send(bucket)
        return bucket


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_both_get_the_bits_of_the_sum(dtype: torch.dtype) -> None:
    # the second is larger than a piece, and no multiple of it
    numel = [8191, neighbours.PIECE_BYTES // 2 + 77]
    pair = Pair(numel, 1 << 30, dtype)
    a, b = (torch.randn(sum(numel), dtype=torch.float32).to(dtype) for _ in "ab")
    a[3], b[3] = float("inf"), float("nan")
    sent = [pair.fill(rank, 0, values) for rank, values in enumerate((a, b))]
    for end, bucket, mine in zip(pair.ends, sent, pair.parameters, strict=True):
        end.wait(bucket)
        strided = torch.empty(2 * numel[1], dtype=dtype)[::2]
        for parameter in mine:
            start = bucket.starts[id(parameter)]
            wanted = bits((a + b)[start : start + parameter.numel()])
            assert bits(end.reduced(bucket, parameter)) == wanted
            into = torch.empty_like(parameter.detach())
            assert end.reduced(bucket, parameter, into) is into and bits(into) == wanted
        assert bits(end.reduced(bucket, mine[1], strided)) == bits(
            (a + b)[bucket.starts[id(mine[1])] :][: numel[1]]
        )
        end.release(bucket)


def test_nans_have_the_same_bits_on_both() -> None:
    pair = Pair([8], 1 << 30)
    quiet = [
        torch.full((8,), payload, dtype=torch.int32).view(torch.float32)
        for payload in (0x7FC00001, 0x7FC00002)
    ]
    sent = [pair.fill(rank, 0, values) for rank, values in enumerate(quiet)]
    found = []
    for end, bucket, (parameter,) in zip(pair.ends, sent, pair.parameters, strict=True):
        end.wait(bucket)
        found.append(bits(end.reduced(bucket, parameter)))
    assert found[0] == found[1]


class Offers(torch.autograd.Function):
    """Stands for a compiled graph that offers gradients in an order of its own."""

    @staticmethod
    def forward(
        ctx: Any, reducer: GradientReducer, order: Sequence[int], value: float, *p: Tensor
    ) -> Tensor:
        ctx.reducer, ctx.order, ctx.value, ctx.parameters = reducer, order, value, p
        return sum(x.sum() for x in p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[Tensor | None] = [
            torch.full_like(p, ctx.value + i) for i, p in enumerate(ctx.parameters)
        ]
        for i in ctx.order:
            parameter = ctx.reducer.mine[i]
            if ctx.reducer.takes(parameter):
                updates._known(parameter).taken_in = updates._backward_pass()
                ctx.reducer.take(parameter, found[i])
                updates.settled(parameter)
                found[i] = None
        return None, None, None, *found


@pytest.mark.parametrize("seed", range(12))
def test_ranks_never_wait_for_each_other_for_ever(seed: int) -> None:
    """Each offers its gradients in an order of its own, in steps of its own pace."""
    draw = random.Random(seed)
    sizes = [draw.choice([16, 1024, 3000, 5000, 9000]) for _ in range(draw.randrange(3, 14))]
    pair = Pair(sizes, 4 * draw.choice([1024, 6000]))
    failed: list[BaseException] = []

    def train(rank: int) -> None:
        mine, own = pair.parameters[rank], random.Random(f"{seed} {rank}")
        reducer = GradientReducer(mine, pair.buckets[rank], pair.ends[rank])
        reducer.mine = mine  # type: ignore[attr-defined]
        for step in range(6):
            reducer.expect()
            order = own.sample(range(len(mine)), len(mine))
            Offers.apply(
                reducer, order[: own.randrange(len(mine) + 1)], float(step + rank), *mine
            ).backward()
            for i, parameter in enumerate(mine):
                assert parameter.grad is not None
                assert (parameter.grad == step + 0.5 + i).all()
                parameter.grad = None
            assert not reducer.expects

    def guarded(rank: int) -> None:
        try:
            train(rank)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert not failed and not any(thread.is_alive() for thread in threads)


@given(
    sizes=st.lists(st.integers(1, 900), min_size=1, max_size=20),
    cap=st.integers(1, 900),
    moves=st.lists(st.integers(0, 5), max_size=60),
)
def test_places_are_apart_and_the_next_bucket_finds_one(
    sizes: list[int], cap: int, moves: list[int]
) -> None:
    buckets = cut([torch.nn.Parameter(torch.zeros(size)) for size in sizes], 4 * cap)
    room = BucketRoom.of(buckets, 4 * cap)
    places = BucketPlaces(room)
    held: dict[int, neighbours._Place] = {}
    sent: list[neighbours._Place] = []
    turn = 0
    for move in moves:
        number = turn + move
        if number >= len(buckets):
            continue
        nbytes = buckets[number].nbytes
        if number not in held:
            promised = places.has_room(nbytes, move == 0)
            place = places.take(nbytes, move == 0)
            if place is None and promised:
                for one in sent:  # all that was sent is read
                    while one.readers:
                        places.is_read(one)
                sent.clear()
                place = places.take(nbytes, move == 0)
                assert place is not None
            if place is not None:
                held[number] = place
        if move == 0:
            place = held.pop(number)
            place.is_sent = True
            sent.append(place)
            turn += 1
        taken = sorted((p.offset, p.nbytes) for p in (*held.values(), *sent))
        for (offset, nbytes), (following, _) in pairwise(taken):
            assert offset + nbytes <= following
        assert all(offset + nbytes <= room.nbytes for offset, nbytes in taken)


def test_a_rank_that_ends_is_missed_only_when_it_is_needed() -> None:
    pair = Pair([8, 8], 32)
    bucket = pair.fill(0, 0, torch.ones(8))
    pair.fill(1, 0, torch.ones(8))
    del pair.ends[1]
    pair.ends[0].wait(bucket)
    (parameter,) = bucket.parameters
    assert float(pair.ends[0].reduced(bucket, parameter).sum()) == 16
    pair.ends[0].release(bucket)
    assert pair.ends[0].give_memory(pair.buckets[0][1], is_next=True)
    with pytest.raises(RuntimeError, match="closed by peer"):
        pair.ends[0].send(pair.buckets[0][1])
    with pytest.raises(RuntimeError, match="closed by peer"):
        pair.ends[0].wait(pair.buckets[0][1])


def test_a_rank_whose_children_hold_its_pipe_is_missed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "LOOK_S", 0.01)
    pair = Pair([8], 32)
    bucket = pair.fill(0, 0, torch.ones(8))
    pair.lives = False
    with pytest.raises(RuntimeError, match="closed by peer"):
        pair.ends[0].wait(bucket)


def test_a_rank_that_says_nothing_is_waited_for_as_long_as_the_group_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(neighbours, "LOOK_S", 0.01)
    pair = Pair([8], 32)
    bucket = pair.fill(0, 0, torch.ones(8))
    pair.ends[0]._longest_s = 0.0
    with pytest.raises(RuntimeError, match="sent nothing for 0 s"):
        pair.ends[0].wait(bucket)


def test_another_bucket_than_the_one_whose_turn_it_is_is_refused() -> None:
    pair = Pair([8, 8], 32)
    bucket = pair.fill(0, 0, torch.ones(8))
    pair.fill(1, 1, torch.ones(8))
    with pytest.raises(RuntimeError, match="sent bucket 1 instead of 0"):
        pair.ends[0].wait(bucket)


def test_only_the_file_that_was_meant_is_opened() -> None:
    own, another = OwnSide(64), OwnSide(64)
    at = own.address
    wrong = neighbours.Address(at.pid, at.memory, at.messages, another.address.inodes)
    with pytest.raises(OffloadError, match="is another file"):
        OtherSide(wrong)
    before = len(os.listdir("/proc/self/fd"))
    with suppress(OffloadError):
        OtherSide(wrong)
    assert len(os.listdir("/proc/self/fd")) == before
