"""Optimizers beside a GPU: gradients that cross while it computes, states on the host, kernels.

Tests that also run on the CPU target name it among their devices; the others need a card.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import adamw_cases
import pytest
import torch
from gpu_checks import deterministic
from torch import nn

import offcompile
from offcompile import optim
from offcompile.runtime import kernels
from offcompile.runtime.kernels import AdamStep, AdamTensors, adam_launch, adam_torch, adam_update
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.registry import Runtime, RuntimeSettings, runtime_for
from offcompile.runtime.moves.weights import is_on_host, live_on_host
from offcompile.runtime.states.gradient_transport import carrier_of
from offcompile.runtime.states.update_workers import UpdateWorkers

gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DEVICES = [pytest.param("cpu"), pytest.param("cuda:0", marks=gpu)]
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=gpu)])
MIB = 1 << 20
#: cycles of a kernel that does nothing: some 100 ms
LONG = 200_000_000

Make = Callable[[nn.Module], torch.optim.Optimizer]


def stack(width: int, layers: int, device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts, nn.LayerNorm(width)).to(device, dtype)


def train(model: nn.Module, forward: Any, make: Make, steps: int = 6) -> list[torch.Tensor]:
    """Losses, then the weights; on the CPU."""
    optimizer = make(model)
    first = next(model.parameters())
    losses = []
    for step in range(steps):
        random = torch.Generator().manual_seed(step)
        x = torch.randn(32, first.shape[1], generator=random).to(first.device, first.dtype)
        loss = forward(x).float().square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().cpu())
    return losses + [p.detach().cpu().clone() for p in model.parameters()]


def plain(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, fused=True)


def clipped(model: nn.Module) -> torch.optim.Optimizer:
    """torch's, with clipping as everybody writes it."""
    optimizer = plain(model)

    def clip(*asked: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def beside(**asked: Any) -> Make:
    return lambda model: optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1, **asked)


def assert_same(
    found: list[torch.Tensor], expected: list[torch.Tensor], device: str, most: float = 1e-4
) -> None:
    """On a GPU torch's own update is another kernel, which rounds differently.

    Adam turns a gradient near zero into a step of full size with its sign, so that a rounding can
    show in one weight of thousands: tensors are compared as a whole.
    """
    for mine, theirs in zip(found, expected, strict=True):
        if device == "cpu":
            assert torch.equal(mine, theirs)
        else:
            off, size = (mine - theirs).double().norm(), theirs.double().norm()
            assert off <= most * size, f"{float(off / size):.2g} of its size off"


# --- equality with torch --------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("states", ["device", "host"])
def test_steps_are_torch_s(states: str, overlap: bool, max_norm: float | None, device: str) -> None:
    with deterministic():
        theirs, mine = stack(64, 3, device), stack(64, 3, device)
        expected = train(theirs, theirs, plain if max_norm is None else clipped)
        made = beside(states=states, overlap=overlap, max_norm=max_norm)
        found = train(mine, mine, made)
    assert_same(found, expected, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_of_muon_are_torch_s(overlap: bool, device: str) -> None:
    """Also beside a card, where momentum crosses and torch's own kernels update there."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.ndim == 2]

    with deterministic():
        theirs, mine = stack(192, 2, device), stack(192, 2, device)
        expected = train(theirs, theirs, lambda m: torch.optim.Muon(matrices(m), 0.02))
        asked = {"states": "host", "overlap": overlap}
        found = train(mine, mine, lambda m: optim.Muon(matrices(m), 0.02, **asked))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("lowering", "device"),
    [
        pytest.param("aot_eager", "cpu"),
        pytest.param("aot_eager", "cuda:0", marks=gpu),
        pytest.param("inductor", "cuda:0", marks=gpu),
    ],
)
def test_compiled_steps_with_weights_on_the_host_are_torch_s(
    lowering: str, overlap: bool, device: str
) -> None:
    theirs, mine = stack(128, 4, device), stack(128, 4, device)
    with deterministic():
        torch._dynamo.reset()
        compiled = torch.compile(theirs, backend=lowering, dynamic=False)
        expected = train(theirs, compiled, plain)
        torch._dynamo.reset()
        options = {"memory": "minimum", "lowering": lowering}
        forward = torch.compile(mine, backend="offcompile", options=options, dynamic=False)
        found = train(mine, forward, beside(states="host", overlap=overlap))
    assert any(is_on_host(p) for p in mine.parameters())
    # Inductor adds in another order, six steps long
    assert_same(found, expected, device, 1e-2 if lowering == "inductor" else 1e-4)
    assert offcompile.counters()["live_tickets"] == 0


@on_gpu
def test_bfloat16_weights_have_masters_on_the_host(device: str) -> None:
    """Masters add up what bfloat16 would round away."""
    model = stack(64, 2, device, torch.bfloat16)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = optim.AdamW(
        model.parameters(), 1e-6, weight_decay=0.0, states="host", stream=0.0, overlap=True
    )
    for step in range(10):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).to(device)
        model(x.bfloat16()).float().square().sum().backward()
        optimizer.step()
    for p, first in zip(model.parameters(), before, strict=True):
        master = optimizer.state[p]["master"]
        assert master.device.type == "cpu" and master.dtype == torch.float32
        assert torch.equal(p.detach().cpu(), master.to(torch.bfloat16))
        assert not torch.equal(master, first.float().cpu())


# --- arrival and overlap --------------------------------------------------------------------------


def runtime(device: str) -> tuple[Runtime, str]:
    key = RuntimeSettings(target=device).key
    return runtime_for(key), key


@on_gpu
def test_a_sent_gradient_arrives_while_compute_goes_on(device: str) -> None:
    made, _ = runtime(device)
    parameter = torch.zeros(4 * MIB, device=device)
    carrier = carrier_of(parameter)
    assert carrier is not None and carrier.device is not None
    carrier.place(parameter)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG // 4)
    gradient = torch.full_like(parameter, 3.0)
    brought = carrier.bring(parameter, gradient, "g", lent=True)
    gradient.fill_(7.0)
    torch.cuda._sleep(2 * LONG)
    brought.arrive()
    assert not torch.cuda.current_stream().query(), "the host waited for what came later"
    assert bool((brought.gradient == 3.0).all())
    torch.cuda.synchronize()
    assert made.mover is carrier.mover


@on_gpu
def test_an_updated_weight_is_back_before_it_is_used(device: str) -> None:
    parameter = torch.zeros(16 * MIB, device=device)
    carrier = carrier_of(parameter)
    assert carrier is not None
    for value in range(1, 6):
        torch.cuda._sleep(LONG // 10)
        read = parameter.sum()  # still to run when the gradient is sent
        brought = carrier.bring(parameter, torch.ones_like(parameter), "w")
        brought.arrive()
        carrier.place(parameter).add_(brought.gradient)
        carrier.updated(parameter, "w")
        carrier.finish()
        assert bool((parameter == value).all())
        assert float(read) == (value - 1) * parameter.numel()


@on_gpu
def test_the_host_never_writes_a_weight_that_is_still_read(device: str) -> None:
    """On host memory, in place: kernels read while the gradient is there already."""
    made, key = runtime(device)
    parameter = nn.Parameter(torch.zeros(4 * MIB, device=device))
    live_on_host(made.device, [parameter])
    carrier = carrier_of(parameter)
    assert carrier is not None
    for value in range(1, 6):
        gradient = torch.ones_like(parameter)
        ticket = ops.start_store(gradient, "g", "host", "d2h", key)
        torch.cuda._sleep(LONG // 10)
        read = parameter.detach().sum()
        ops.wait_out(ticket, gradient)
        host = ops.host_of(ticket, (4 * MIB,), (1,), torch.float32, device)
        brought = carrier.bring(parameter, host, "w")
        brought.arrive()
        carrier.place(parameter).add_(brought.gradient)
        carrier.updated(parameter, "w")
        carrier.finish()
        assert float(read) == (value - 1) * parameter.numel()
        assert bool((parameter == value).all())


@on_gpu
def test_a_weight_is_held_until_its_update(device: str) -> None:
    made, key = runtime(device)
    parameter = nn.Parameter(torch.zeros(4 * MIB, device=device))
    live_on_host(made.device, [parameter])
    carrier, channels = carrier_of(parameter), UpdateWorkers()
    assert carrier is not None
    for value in range(1, 6):
        torch.cuda._sleep(LONG // 10)
        brought = carrier.bring(parameter, torch.ones_like(parameter), "w", lent=True)
        place = carrier.place(parameter)
        job = channels.submit(brought.arrive, lambda b=brought, p=place: p.add_(b.gradient), "w")
        made.device.hold(parameter, job.wait)
        size, stride = parameter.shape, parameter.stride()
        fetched = ops.start_fetch(
            parameter, size, stride, parameter.dtype, "w", "h2d", [], key, device
        )
        assert job.over
        assert bool((ops.wait_load(*fetched) == value).all())
    channels.close()


@on_gpu
def test_gradients_and_states_on_the_host_take_nothing_of_the_card(device: str) -> None:
    model = stack(2048, 4, device)
    # none of them streams to the card, where it would take buffers
    optimizer = optim.AdamW(model.parameters(), states="host", stream=0.0, overlap=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(device)
    for step in range(3):
        model(torch.full((8, 2048), float(step), device=device)).sum().backward()
        optimizer.step()
    torch.cuda.synchronize()
    carrier = carrier_of(next(model.parameters()))
    assert carrier is not None
    carrier.device.drain()
    # cuBLAS keeps a workspace for each thread: 32 MiB on Hopper, in forward's and in backward's
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()
    # not 8 bytes for each of 16M parameters and 4 for its gradient
    found = torch.cuda.memory_allocated(device) - before
    assert found < 8 * MIB, torch.cuda.memory_snapshot()
    assert optimizer.facts().updated_in_backward == len(list(model.parameters()))


# --- the update kernel ----------------------------------------------------------------------------

needs_triton = pytest.mark.skipif(not kernels.has_triton(), reason="Triton is not installed")


@on_gpu
@needs_triton
@pytest.mark.parametrize("name", adamw_cases.CASES)
def test_the_kernel_does_what_torch_s_fused_one_does(name: str, device: str) -> None:
    adamw_cases.CASES[name](torch.device(device))


@on_gpu
@needs_triton
def test_the_kernel_updates_states_in_host_memory(device: str) -> None:
    made, _ = runtime(device)
    count = 3 * MIB + 5
    exp_avg, exp_avg_sq = (
        flat.view(torch.float32).zero_() for flat in made.device.addressable([4 * count] * 2)
    )
    weight, gradient = torch.randn(count, device=device), torch.randn(count, device=device)
    mine = AdamTensors(weight, gradient, exp_avg, exp_avg_sq)
    meant = AdamTensors(*(t.cpu().clone() for t in mine.elementwise))
    before = weight._version
    for step in (1, 2, 3):
        adam_update(mine, AdamStep(step, lr=0.1, weight_decay=0.1))
        adam_torch(meant, AdamStep(step, lr=0.1, weight_decay=0.1))
    assert weight._version > before
    for found, expected in zip(mine.elementwise, meant.elementwise, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)
    # the host sees the same memory
    torch.cuda.synchronize()
    assert torch.equal(made.device.on_host(exp_avg), exp_avg.cpu())


@on_gpu
@needs_triton
def test_rates_of_updates(device: str) -> None:
    """Printed (`-s`): 28 bytes for each parameter, by the kernel and by torch's fused one."""
    made, _ = runtime(device)
    count = 64 * MIB
    weight, gradient = torch.randn(count, device=device), torch.randn(count, device=device)
    near = [torch.zeros(count, device=device) for _ in range(2)]
    far = [flat.view(torch.float32).zero_() for flat in made.device.addressable([4 * count] * 2)]
    step = torch.ones((), device=device)

    def fused() -> None:
        torch._fused_adamw_(
            [weight],
            [gradient],
            [near[0]],
            [near[1]],
            [],
            [step],
            lr=1e-3,
            beta1=0.9,
            beta2=0.999,
            weight_decay=0.01,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )

    where = torch.device(device)
    times = {"torch fused, on the card": kernels.device_time_us(fused, where)}
    for said, states in (("ours, on the card", near), ("ours, states on the host", far)):
        launch = adam_launch(AdamTensors(weight, gradient, *states), AdamStep(1))
        times[said] = kernels.device_time_us(launch.run, where)
    for said, time_us in times.items():
        rate = 28 * count / time_us / 1e3
        print(f"{said}: {time_us:.0f} us, {rate:.0f} GB/s, {count / time_us / 1e3:.1f} G/s")
    # far below what would make the kernel worth having
    assert times["ours, on the card"] < 2 * times["torch fused, on the card"]
