"""The operators: in fx graphs run as they are, under Inductor, and under autograd's lifetimes."""

from __future__ import annotations

import gc
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx_inner
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import counters, record
from offcompile.runtime.base.define import current, inside
from offcompile.runtime.moves import ops, registry
from offcompile.runtime.moves.registry import RuntimeSettings, close_all, runtime_for, runtimes
from offcompile.runtime.states import update_ops

KEY = RuntimeSettings(chunk_bytes=1 << 20).key
SIZE = 128


@pytest.fixture(autouse=True)
def closing() -> Iterator[None]:
    yield
    gc.collect()
    close_all()


def out(x: torch.Tensor, tag: str) -> torch.Tensor:
    return ops.start_out(x, tag, "host", "out", KEY)


def back(ticket: torch.Tensor, like: torch.Tensor, tag: str, *after: torch.Tensor) -> Any:
    return ops.start_load(ticket, like.shape, like.stride(), like.dtype, tag, "in", list(after))


def moved(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Saves x, in permuted strides, and h; loads x twice and h once, early."""
    x = torch.sin(a) * 2 + 1
    h = torch.mm(x, w)
    flipped = x.permute(1, 0)
    x_ticket = out(flipped, "x")
    h_ticket = out(h, "h")
    v = torch.mm(torch.cos(h), w)
    x_ticket = ops.wait_out(x_ticket, flipped)
    # the next tensor may take x's memory only after the wait
    v = ops.barrier(v, [x_ticket])
    h_ticket = ops.wait_out(h_ticket, h)
    q = torch.exp(v * 0.01) + 1
    r = torch.mm(q, w)
    x1, x1_load = back(x_ticket, flipped, "x.1", h_ticket, r)
    x2, x2_load = back(x_ticket, flipped, "x.2", x1_load)
    h1, h_load = back(h_ticket, h, "h.1", x2_load)
    s = torch.mm(torch.tanh(r) + q, w)
    x1 = ops.wait_load(x1, x1_load)
    z = x1.permute(1, 0) + s
    h1 = ops.wait_load(h1, h_load)
    x2 = ops.wait_load(x2, x2_load)
    return torch.relu(z + h1 * 3).sum(), torch.sin(h1), x2.permute(1, 0) + s


def plain(a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = torch.sin(a) * 2 + 1
    h = torch.mm(x, w)
    q = torch.exp(torch.mm(torch.cos(h), w) * 0.01) + 1
    s = torch.mm(torch.tanh(torch.mm(q, w)) + q, w)
    return torch.relu(x + s + h * 3).sum(), torch.sin(h), x + s


ORDER = [
    ("start_out", "x"),
    ("start_out", "h"),
    ("wait_out", "x"),
    ("wait_out", "h"),
    ("start_load", "x.1"),
    ("start_load", "x.2"),
    ("start_load", "h.1"),
    ("wait_load", "x.1"),
    ("wait_load", "h.1"),
    ("wait_load", "x.2"),
]


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(SIZE, SIZE), torch.randn(SIZE, SIZE) / SIZE**0.5


def traced() -> torch.fx.GraphModule:
    return make_fx(moved, tracing_mode="fake")(*inputs())


def test_a_graph_runs_the_ops_in_order_and_gets_the_same_bits() -> None:
    graph = traced()
    with record() as recording, warnings.catch_warnings():
        warnings.simplefilter("error")
        found = graph(*inputs())
    assert recording.ops() == ORDER
    assert all(torch.equal(f, p) for f, p in zip(found, plain(*inputs()), strict=True))
    jobs = recording.kinds("begin_load", "end_load", "begin_out", "end_out")
    assert len(jobs) == 10
    assert {event.lane for event in jobs} == {"in", "out"}


def test_dead_code_elimination_and_cse_leave_moves_alone() -> None:
    from torch._functorch.compile_utils import fx_graph_cse

    def alone(x: torch.Tensor) -> torch.Tensor:
        ops.wait_out(out(x, "x"), x)
        return x + 1

    graph = make_fx(alone, tracing_mode="fake")(torch.zeros(4))
    graph.graph.eliminate_dead_code()
    targets = [node.target for node in graph.graph.nodes]
    assert ops.start_out in targets
    assert ops.wait_out in targets
    merged = fx_graph_cse(traced().graph)
    assert sum(node.target is ops.start_load for node in merged.nodes) == 3


def test_inductor_runs_the_ops_in_order_and_reuses_no_memory_in_flight() -> None:
    # the scheduler's own reordering would put every wait right behind its start
    with config.patch(reorder_for_peak_memory=False):
        compiled = compile_fx_inner(traced(), list(inputs()))
    want = plain(*inputs())
    for _ in range(3):
        with record() as recording:
            found = compiled(list(inputs()))
        assert recording.ops() == ORDER
        for f, p in zip(found, want, strict=True):
            torch.testing.assert_close(f, p, rtol=1e-5, atol=1e-5)
    del found, f
    assert counters()["live_tickets"] == 0
    assert counters()["spill_bytes"] == 0


def test_a_load_in_another_size_is_refused() -> None:
    x = torch.zeros(4, 4)
    ticket = out(x, "x")
    with pytest.raises(OffloadError, match=r"late cannot be loaded .* 32 bytes: 64 bytes"):
        ops.start_load(ticket, [8], [1], torch.float32, "late", "in", [])


def test_fake_tensors_have_the_strides_that_are_asked_for() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(4, 6).t()
        ticket = out(x, "x")
        buffer, load = back(ops.wait_out(ticket, x), x, "x")
        y = ops.barrier(ops.wait_load(buffer, load), [ticket])
    assert (ticket.dtype, ticket.shape, load.shape) == (torch.int64, (1,), (1,))
    assert (y.shape, y.stride(), y.dtype) == (x.shape, x.stride(), x.dtype)
    assert y.untyped_storage()._cdata == buffer.untyped_storage()._cdata


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.complex64])
def test_every_dtype_comes_back(dtype: torch.dtype) -> None:
    x = (torch.randn(33, 65) * 4).to(dtype).t()
    ticket = ops.wait_out(out(x, "x"), x)
    buffer, load = back(ticket, x, "x")
    y = ops.wait_load(buffer, load)
    assert torch.equal(x, y)
    assert y.stride() == x.stride()


class Square(torch.autograd.Function):
    """Saves its input by ticket, as a rewritten graph does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.like = torch.empty_like(x, device="meta")
        ctx.save_for_backward(ops.wait_out(out(x, "x"), x))
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (ticket,) = ctx.saved_tensors
        buffer, load = back(ticket, ctx.like, "x")
        return 2 * grad * ops.wait_load(buffer, load)


def live() -> tuple[int | float, int | float]:
    gc.collect()
    found = counters()
    return found["live_tickets"], found["spill_bytes"]


def test_slots_follow_the_lifetime_of_what_autograd_saves() -> None:
    x = torch.arange(1024.0, requires_grad=True)

    def square() -> torch.Tensor:
        return Square.apply(x).sum()

    square().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach())
    assert live() == (0, 0)

    loss = square()
    loss.backward(retain_graph=True)
    assert live() == (1, 4096)
    loss.backward()
    assert torch.equal(x.grad, 6 * x.detach())
    del loss
    assert live() == (0, 0)

    first, second = square(), square()
    assert live() == (2, 8192)
    (first + second).backward()
    assert torch.equal(x.grad, 10 * x.detach())
    del first, second
    assert live() == (0, 0)

    dropped = square()
    assert live() == (1, 4096)
    del dropped
    assert live() == (0, 0)


def test_an_exception_between_start_and_wait_leaves_nothing() -> None:
    def step() -> None:
        x = torch.zeros(300_000)
        ticket = out(x, "x")
        held = back(ticket, x, "x")
        raise ValueError(f"in the middle, {len(held)} tensors held")

    gc.collect()  # other tests' leftovers are not this one's
    before = live()
    with pytest.raises(ValueError, match="in the middle"):
        step()
    # the running copies end by themselves
    for runtime in runtimes():
        runtime.device.drain()
    for _ in range(200):  # a lane tells of the end of a job a moment after the job
        if live() == before:
            break
        time.sleep(0.05)
    assert live() == before


def test_what_was_laid_out_otherwise_than_traced_comes_back_as_it_left() -> None:
    """A convolution may give channels that lie last where its traced form has them second."""
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    ticket = ops.wait_out(out(x, "x"), x)
    buffer, load = back(ticket, x.contiguous(), "x.1")
    again = ops.wait_load(buffer, load)
    assert torch.equal(again, x) and again.stride() == x.stride()


def test_what_holds_for_a_run_holds_on_its_thread_until_it_ends() -> None:
    seen = []

    def look() -> None:
        seen.append(current(int))

    with inside(int, 1):
        with pytest.raises(ValueError, match="in the middle"), inside(int, 2):
            look()
            raise ValueError("in the middle")
        other = threading.Thread(target=look)
        other.start()
        other.join()
        look()
        with inside(int, None):
            look()
    look()
    assert seen == [2, None, 1, None, None]


def test_a_forward_that_runs_by_itself_has_no_parameters_to_offer_gradients_of() -> None:
    with pytest.raises(OffloadError, match="apart from the function"):
        update_ops.begin_call([0])
    with update_ops.calling("graph 0", [torch.ones(1), 2]):
        with pytest.raises(OffloadError, match="apart from the function"):
            update_ops.begin_call([1])
        assert update_ops.begin_call([0]).dtype == torch.int64


def test_a_runtime_made_while_torch_traces_has_real_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are planned under fake tensors; a device's staging must not be made of such."""
    made: list[torch.Tensor] = []

    class Staged:
        def __init__(self, settings: RuntimeSettings) -> None:
            made.append(torch.empty(8))

        def close(self) -> None: ...

    monkeypatch.setattr(registry, "Runtime", Staged)
    with FakeTensorMode():
        runtime_for(RuntimeSettings(chunk_bytes=4096 * 7).key)
    close_all()
    assert made and not isinstance(made[0], FakeTensor)
