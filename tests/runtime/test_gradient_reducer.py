"""Gradients are reduced in one order, in little memory, however they come. A world of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from offcompile.ir import OffloadError
from offcompile.runtime.ranks.buckets import LEAST_BYTES, Bucket, bucket_bytes, cut
from offcompile.runtime.ranks.exchange import AllReduce
from offcompile.runtime.ranks.gradient_reducer import GradientReducer
from offcompile.runtime.states import updates

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without torch.distributed")

NUMEL = 2048
NBYTES = 4 * NUMEL


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Recorder:
    """An optimizer that keeps what it gets."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.taken: dict[int, Tensor] = {}
        self.final: dict[int, Tensor] = {}
        self.passes = 0
        updates.register(parameters, self)

    def held_bytes(self) -> int:
        return 0

    def reduced(self) -> None:
        self.passes += 1

    def takes(self, parameter: Tensor) -> bool:
        return True

    def take(self, parameter: Tensor, gradient: Tensor) -> None:
        self.taken[id(parameter)] = gradient.clone()

    def came(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.final[id(parameter)] = parameter.grad.clone()


class Graph(torch.autograd.Function):
    """Stands for a compiled graph: offers gradients in an order of its own, one after the other,
    and leaves to autograd those that are not taken."""

    @staticmethod
    def forward(ctx: Any, reducer: GradientReducer, order: Sequence[int], *p: Tensor) -> Tensor:
        ctx.reducer, ctx.order, ctx.parameters = reducer, order, p
        return sum(x.sum() for x in p)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        found: list[Tensor | None] = [torch.full_like(p, i) for i, p in enumerate(ctx.parameters)]
        if len(found) > LACKING:
            found[LACKING] = None
        for i in ctx.order:
            parameter = leaves[i]
            if found[i] is not None and ctx.reducer.takes(parameter):
                updates._known(parameter).taken_in = updates._backward_pass()
                ctx.reducer.take(parameter, found[i])
                updates.settled(parameter)
                found[i] = None
        return None, None, *found


leaves: list[Tensor] = []
#: index of a parameter that has no gradient
LACKING = 99


def parameters(count: int) -> list[Tensor]:
    leaves[:] = [torch.nn.Parameter(torch.zeros(NUMEL)) for _ in range(count)]
    return list(leaves)


def reduces(mine: Sequence[Tensor], cap_bytes: int) -> GradientReducer:
    buckets = cut(mine, cap_bytes)
    return GradientReducer(mine, buckets, AllReduce(None, buckets, cap_bytes))


def watched(reducer: GradientReducer, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], list]:
    """Indices of buckets in the order in which they are sent, and the memory of all each time."""
    sent: list[int] = []
    held: list[int] = []
    send, give = reducer._send, reducer._give_memory

    def sends(bucket: Bucket) -> None:
        sent.append(reducer.buckets.index(bucket))
        send(bucket)

    def gives(bucket: Bucket) -> None:
        give(bucket)
        held.append(sum(b.nbytes for b in reducer.buckets if b.memory is not None))

    monkeypatch.setattr(reducer, "_send", sends)
    monkeypatch.setattr(reducer, "_give_memory", gives)
    return sent, held


ORDERS = ([7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7], [3, 0, 7, 1, 6, 2, 5, 4])


@pytest.mark.parametrize("order", ORDERS)
def test_buckets_are_sent_in_their_order_within_their_limit(
    order: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = parameters(8)
    optimizer, reducer = Recorder(mine), reduces(mine, NBYTES)
    sent, held = watched(reducer, monkeypatch)
    for _ in range(2):
        reducer.expect()
        Graph.apply(reducer, order, *mine).backward()
        assert not reducer.expects
        for p in mine:
            p.grad = None
    assert sent == 2 * list(range(8))
    assert reducer.held_bytes() == 3 * NBYTES and max(held) <= reducer.held_bytes()
    got = optimizer.taken | optimizer.final
    assert [float(got[id(p)].max()) for p in mine] == list(range(8))
    assert len(optimizer.taken) == 8 or order != ORDERS[0]


def test_without_an_optimizer_gradients_stand_in_grad() -> None:
    mine = parameters(3)
    reducer = reduces(mine, 2 * NBYTES)
    for times in (1, 2):
        reducer.expect()
        Graph.apply(reducer, [2, 1, 0], *mine).backward()
        assert [float(p.grad.max()) for p in mine if p.grad is not None] == [0, times, 2 * times]


def test_what_is_not_expected_is_left_alone() -> None:
    mine = parameters(2)
    optimizer, reducer = Recorder(mine), reduces(mine, NBYTES)
    Graph.apply(reducer, [1, 0], *mine).backward()  # as in no_sync
    assert not optimizer.taken and not optimizer.final
    reducer.expect()
    Graph.apply(reducer, [1, 0], *mine).backward()
    assert [float(optimizer.final[id(p)].max()) for p in mine] == [0, 2]


def test_gradients_of_one_forward_may_come_in_several_passes() -> None:
    mine = parameters(4)
    optimizer, reducer = Recorder(mine), reduces(mine, 4 * NBYTES)
    reducer.expect()
    (mine[0].sum() + mine[3].sum()).backward()
    assert reducer.expects and not optimizer.final
    with pytest.raises(OffloadError, match="2 parameters got no gradient"):
        reducer.expect()
    (mine[1].sum() + mine[2].sum()).backward()
    assert not reducer.expects and len(optimizer.final) == 4


@pytest.mark.parametrize("updates_in_backward", [False, True])
def test_no_gradient_counts_as_zeros(
    updates_in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = parameters(3)
    optimizer = Recorder(mine) if updates_in_backward else None
    reducer = reduces(mine, NBYTES)
    monkeypatch.setattr(f"{__name__}.LACKING", 1)
    reducer.expect()
    Graph.apply(reducer, [2, 1, 0], *mine).backward()
    assert not reducer.expects
    if optimizer is None:
        assert [float(p.grad.max()) for p in mine if p.grad is not None] == [0, 0, 2]
    else:
        assert [float(optimizer.taken[id(p)].max()) for p in mine] == [0, 0, 2]


def test_a_second_gradient_after_the_first_was_reduced_is_refused() -> None:
    mine = parameters(3)
    reducer = reduces(mine, NBYTES)
    reducer.expect()
    mine[2].sum().backward()  # its bucket is sent at once
    with pytest.raises(OffloadError, match="another gradient after ranks"):
        (mine[0].sum() + mine[2].sum()).backward()


def test_a_dead_reducer_leaves_parameters_as_they_were() -> None:
    mine = parameters(2)
    reducer = reduces(mine, NBYTES)
    reducer.expect()
    assert updates.reducer_of(mine[0]) is reducer
    del reducer
    assert updates.reducer_of(mine[0]) is None
    mine[0].sum().backward()
    assert mine[0].grad is not None


def test_buckets_follow_from_parameters_alone() -> None:
    shapes = [(600, 1000), (1000,), (300, 1000), (10,), (200, 1000)]
    mine = [torch.nn.Parameter(torch.zeros(*shape)) for shape in shapes]
    mine.append(torch.nn.Parameter(torch.zeros(300, 1000, dtype=torch.bfloat16)))
    found = cut(mine, 2_500_000)
    where = [_in(bucket, mine) for bucket in found]
    assert where == [[5], [4, 2], [0], [3, 1]]  # in reverse, the small ones last
    assert bucket_bytes(mine, 25 << 20) == LEAST_BYTES
    assert bucket_bytes(mine, 1000) == 1000


def _in(bucket: Bucket, mine: list[Any]) -> list[int]:
    numbers = {id(p): i for i, p in enumerate(mine)}
    return [numbers[id(p)] for p in bucket.parameters]
