"""Weights and gradients in pinned host memory on a real GPU: equality, order, memory, overlap."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gpu_checks import OVERHEAD_BYTES, deterministic
from torch import nn

import offcompile
from offcompile.runtime import kernels
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.streams import TorchStreams
from offcompile.runtime.device.tickets import find
from offcompile.runtime.memory.host_arena import HostArena
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.registry import Runtime, RuntimeSettings, runtime_for
from offcompile.runtime.moves.saved import Load
from offcompile.runtime.moves.weights import is_on_host

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda:0", marks=gpu)]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=gpu)])
MIB = 1 << 20
#: cycles of a kernel that does nothing: some 100 ms
LONG = 200_000_000

Optimizers = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizers] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2),
}


def stack(width: int, layers: int, device: str) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.LayerNorm(width)).to(device)


def train(
    model: nn.Module, forward: Any, rows: int, optimizer: Optimizers, steps: int = 5
) -> list[torch.Tensor]:
    """Losses, then gradients and weights of the last step; on the CPU, so that all can be freed."""
    first = next(model.parameters())
    stepper = optimizer(model.parameters())
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(rows, first.shape[1], generator=random).to(first.device)
        stepper.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        stepper.step()
        losses.append(loss.detach().cpu())
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    return losses + [t.detach().cpu().clone() for t in tensors]


def ours(model: nn.Module, memory: int | str, lowering: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    options = {"memory": memory, "lowering": lowering}
    return torch.compile(model, backend="offcompile", options=options)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_five_steps_are_the_plain_ones_to_the_bit(name: str, device: str) -> None:
    with deterministic():
        plain, model = stack(128, 4, device), stack(128, 4, device)
        torch._dynamo.reset()
        compiled = torch.compile(plain, backend="aot_eager")
        expected = train(plain, compiled, 32, OPTIMIZERS[name])
        found = train(model, ours(model, "minimum"), 32, OPTIMIZERS[name])
    assert any(is_on_host(p) for p in model.parameters())
    assert all(p.device == torch.device(device) for p in model.parameters())
    assert len(found) == len(expected)
    for i, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(mine, theirs), f"tensor {i}"
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


@on_gpu
def test_inductor_with_streamed_products_is_close(device: str) -> None:
    plain, model = stack(256, 4, device), stack(256, 4, device)
    expected = train(plain, plain, 32, OPTIMIZERS["sgd"])
    found = train(model, ours(model, "minimum", "inductor"), 32, OPTIMIZERS["sgd"])
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@on_gpu
def test_a_model_larger_than_its_budget_keeps_it(device: str) -> None:
    """By the allocator: once the weights have left, no more than the budget is given out."""
    torch.zeros(64, 64, device=device) @ torch.zeros(64, 64, device=device)
    before = torch.cuda.memory_allocated(device)
    model = stack(2048, 12, device)
    weights = sum(p.nbytes for p in model.parameters())
    budget = weights // 2  # and gradients as much again
    forward = ours(model, budget)
    train(model, forward, 64, OPTIMIZERS["sgd"], steps=1)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    for step in range(3):
        x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(step)).to(device)
        forward(x).square().mean().backward()
        model.zero_grad()
    peak = torch.cuda.max_memory_allocated(device) - before
    # the momentum is gone with its optimizer
    assert peak <= budget + OVERHEAD_BYTES
    assert sum(p.nbytes for p in model.parameters() if is_on_host(p)) > weights // 2


# --- the runtime by itself ------------------------------------------------------------------------


def runtime(device: str) -> tuple[Runtime, str]:
    key = RuntimeSettings(target=device).key
    return runtime_for(key), key


def fetched(host: torch.Tensor, key: str) -> tuple[torch.Tensor, torch.Tensor]:
    size, stride = host.shape, host.stride()
    return ops.start_fetch(host, size, stride, host.dtype, "w", "h2d", [], key, str(host.device))


@on_gpu
def test_a_load_never_overtakes_the_update_of_its_weight(device: str) -> None:
    made, key = runtime(device)
    (flat,) = made.device.addressable([64 * MIB])
    weight = flat.view(torch.float32).fill_(1.0)
    torch.cuda.synchronize()
    for value in range(2, 6):
        torch.cuda._sleep(LONG // 4)
        weight += 1.0
        copy = ops.wait_load(*fetched(weight, key))
        assert bool((copy == value).all())


@on_gpu
def test_gradients_go_round_in_the_same_memory(device: str) -> None:
    made, key = runtime(device)
    assert isinstance(made.device, CudaDevice)
    (keeper,) = made.device.addressable([16 * MIB])
    places = set()
    for value in range(5):
        gradient = torch.full((4 * MIB,), float(value), device=device)
        ticket = ops.start_store(gradient, "g", "host", "d2h", key)
        ops.wait_out(ticket, gradient)
        del gradient
        size, stride = (4 * MIB,), (1,)
        host = ops.host_of(ticket, size, stride, torch.float32, device)
        del ticket
        assert host.device == torch.device(device) and is_on_host(host)
        torch.cuda._sleep(LONG // 10)
        total = host.sum()  # still to run when the tensor dies
        places.add(host.data_ptr())
        del host
        # the next one gets that memory, and must not write before the sum has read
        other = torch.full((4 * MIB,), -1.0, device=device)
        ticket = ops.start_store(other, "h", "host", "d2h", key)
        ops.wait_out(ticket, other)
        del ticket, other
        assert float(total) == 4 * MIB * value
    # not one for each: the thread that sees copies end may come late, and looks now and then
    assert len(places) <= 3
    assert keeper.numel() == 16 * MIB


@on_gpu
def test_an_alias_outlives_its_arena(device: str) -> None:
    arena = HostArena(64 * MIB)
    made = CudaDevice(TorchStreams(torch.device(device)), arena, {})
    first, second = made.addressable([MIB, MIB])
    assert second.data_ptr() - first.data_ptr() == MIB
    view = first.view(torch.float32)[5:]
    del first
    gc.collect()
    made.close()
    arena.close()
    view.fill_(3.0)
    assert float(view.sum()) == 3.0 * view.numel()
    del view, second
    gc.collect()
    assert made.slot_of(torch.ones(1)) is None
    made.shadows.release()
    arena.close()
    assert arena.used_bytes == 0


@on_gpu
def test_a_fetch_runs_beside_compute(device: str) -> None:
    """By the device's own clock the copy ends before the compute that was queued behind it."""
    arena = HostArena(512 * MIB)
    made = CudaDevice(TorchStreams(torch.device(device)), arena, {}, timed=True)
    mover = Mover(made)
    (host,) = made.addressable([128 * MIB])
    host.fill_(1)
    torch.cuda.synchronize()
    buffer, ticket = mover.start_fetch(host, "w", "h2d")
    torch.cuda._sleep(LONG)
    done = torch.cuda.Event(enable_timing=True)
    done.record()
    copied = find(ticket, Load).copy
    assert copied is not None and not done.query(), "issuing a fetch blocked the host"
    mover.wait_load(find(ticket, Load))
    torch.cuda.synchronize()
    assert copied.event.elapsed_time(done) > 0  # type: ignore[attr-defined]
    assert bool((buffer == 1).all())
    del buffer, ticket, host
    mover.close()
    arena.close()


def products(host: torch.Tensor, rows: int, device: str) -> dict[str, Callable[[], object]]:
    """Forward, input gradient and weight gradient with the weight, or its gradient, on `host`."""
    x = torch.randn(rows, host.shape[1], device=device, dtype=host.dtype)
    dy = torch.randn(rows, host.shape[0], device=device, dtype=host.dtype)
    near = torch.empty_like(host, device=device)
    return {
        "forward, streamed": lambda: kernels.stream_matmul(x, host.t()),
        "forward, plain kernel in place": lambda: torch.mm(x, host.t()),
        "forward, copied before": lambda: torch.mm(x, near.copy_(host).t()),
        "input, streamed": lambda: kernels.stream_matmul(dy, host),
        "input, plain kernel in place": lambda: torch.mm(dy, host),
        "gradient, written": lambda: kernels.write_matmul(host, dy.t(), x),
        "gradient, plain kernel in place": lambda: torch.mm(dy.t(), x, out=host),
        "gradient, copied after": lambda: host.copy_(torch.mm(dy.t(), x)),
    }


@on_gpu
@pytest.mark.parametrize("rows", [1, 16, 128, 1024, 8192])
def test_products_over_the_bus(rows: int, device: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Right, and how fast beside what torch does: prints useful GB/s on the bus."""
    made, _ = runtime(device)
    width = 4096
    (flat,) = made.device.addressable([2 * width * width])
    weight = flat.view(torch.bfloat16).view(width, width)
    weight.copy_(torch.randn(width, width, device=device) / 64)
    near = weight.clone()
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    streamed = kernels.stream_matmul(x, weight.t())
    torch.testing.assert_close(streamed, x @ near.t(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(kernels.stream_matmul(x, weight), x @ near, rtol=0.02, atol=0.02)
    told = []
    for name, call in products(weight, rows, device).items():
        took_us = kernels.device_time_us(call, torch.device(device), runs=5)
        told.append(f"{rows:5} rows  {name:34} {weight.nbytes / took_us / 1e3:8.1f} GB/s")
    kernels.write_matmul(weight, x.t(), x)
    torch.testing.assert_close(weight.clone(), x.t() @ x, rtol=0.02, atol=0.1)
    with capsys.disabled():
        print("\n" + "\n".join(told))
