"""Checks of training on the asynchronous device, which `async_child.py` runs."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest import mock

import budget_child
import gpu_checks
import torch
import zoo
from async_device import Controls
from async_own_checks import (
    DELAYS_US,
    DEVICE,
    MIB,
    OF_THE_DEVICE,
    Check,
    settle,
    side_stream,
    touched_by_the_host,
)
from gpu_checks import deterministic
from torch import Tensor, nn
from trust.planted import PLANTS
from zoo import BY_NAME, ZOO

import offcompile
from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.runtime.device.cuda.copies import CudaCopy
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.streams import TorchStreams
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.registry import RuntimeSettings, close_all, runtime_for
from offcompile.runtime.moves.weights import is_on_host, live_on_host
from offcompile.runtime.states.gradient_transport import carrier_of

# --- training -------------------------------------------------------------------------------------


@contextmanager
def seeded(controls: Controls, seed: int) -> Iterator[None]:
    controls.seed(seed)
    try:
        yield
    finally:
        controls.seed(0)


def bitwise(name: str, seed: int, controls: Controls) -> None:
    with seeded(controls, seed):
        gpu_checks.bitwise(name, DEVICE)


def least(name: str, seed: int, controls: Controls) -> None:
    """At the least memory, without the budgets between."""
    specimen = gpu_checks.on(BY_NAME[name], DEVICE)
    with deterministic(), seeded(controls, seed):
        expected = zoo.train(specimen, gpu_checks.plain(), steps=2)
        before = offcompile.counters()["bytes_out"]
        found = zoo.train(specimen, gpu_checks.ours("minimum"), steps=2)
    assert not (wrong := found.differences(expected)), wrong[:5]
    assert offcompile.counters()["bytes_out"] > before
    gpu_checks.nothing_stays()


def as_on_a_gpu(name: str, controls: Controls) -> None:
    with seeded(controls, 1):
        gpu_checks.CHECKS[name](DEVICE)


def peak_within_the_budget(controls: Controls) -> None:
    """By the allocator, at three budgets: all that the steps hold, weights and gradients too."""
    waited = controls.waits()
    large = gpu_checks.on(budget_child.deep_mlp(512, 128, 10), DEVICE)

    def run(memory: int | str) -> tuple[list[str], int]:
        torch._dynamo.reset()
        gc.collect()
        settle()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        losses = budget_child.train(large, memory, budget_child.STEPS)
        return losses, torch.accelerator.max_memory_allocated() - before

    with deterministic(), seeded(controls, 2):
        expected, plain_bytes = run("plain")
        moved = offcompile.counters()["bytes_out"]
        for share in (1.2, 0.7, 0.5):
            budget = int(share * plain_bytes) + MIB
            losses, peak = run(budget)
            assert losses == expected, f"at {budget} bytes"
            assert peak <= budget, f"{peak} bytes were given out of {budget}"
        assert offcompile.counters()["bytes_out"] > moved
    assert controls.waits() == waited, "ops of the step made the host wait"


WORKSPACE_BYTES = 16 * MIB


@torch.library.custom_op("offcompile_tests::with_workspace", mutates_args=())
def with_workspace(x: Tensor) -> Tensor:
    """Takes memory that no plan can know of."""
    torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=x.device).fill_(1)
    return x * 2


with_workspace.register_fake(torch.empty_like)
with_workspace.register_autograd(lambda _, gradient: with_workspace(gradient))


class Working(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = with_workspace(x)
        return made


def an_excess_is_planned_away(controls: Controls) -> None:
    """Steps that take more than planned are planned again, for so much less than the budget."""
    layers = [m for _ in range(8) for m in (nn.Linear(256, 256), Working(), nn.Tanh())]
    model = nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(2048, 256).to(DEVICE)

    def step(run: Any) -> int:
        settle()
        torch.accelerator.reset_peak_memory_stats()
        run(x).sum().backward()
        model.zero_grad()
        settle()
        return torch.accelerator.max_memory_allocated()

    plain = torch.compile(model, backend="aot_eager")
    settle()
    budget = int(0.8 * max(step(plain) for _ in range(2)))
    torch._dynamo.reset()
    options = {"memory": budget, "lowering": "aot_eager"}
    ours = torch.compile(model, backend="offcompile", options=options)
    peaks = [step(ours) for _ in range(6)]
    assert peaks[1] > budget, "the workspace fits, so that this shows nothing"
    assert peaks[-1] <= budget, f"{peaks} of {budget}"
    said = offcompile.reports()[-1].profile.said
    assert sum("planned again for so much less" in line for line in said) == 1, said


def through_files(controls: Controls) -> None:
    """With little room on the host, most of what leaves goes to files and comes back as it was."""
    specimen = gpu_checks.on(BY_NAME["mlp"], DEVICE)

    def spilled(model: nn.Module) -> Any:
        options = {"memory": "minimum", "lowering": "aot_eager", "host_memory": "64KiB"}
        return torch.compile(model, backend="offcompile", options=options)

    with deterministic(), seeded(controls, 3):
        expected = zoo.train(specimen, gpu_checks.plain(), steps=2)
        before = offcompile.counters()["spill_bytes_written"]
        found = zoo.train(specimen, spilled, steps=2)
    assert not (wrong := found.differences(expected)), wrong[:5]
    assert offcompile.counters()["spill_bytes_written"] > before


def verified_against_the_plain_run(controls: Controls) -> None:
    """`verify=True` compares both halves, though what the plain run saves rests on the host."""
    model = gpu_checks.on(BY_NAME["mlp"], DEVICE).fresh()
    options = {"memory": "minimum", "lowering": "aot_eager", "verify": True}
    forward = torch.compile(model, backend="offcompile", options=options)
    forward(torch.randn(1024, 128).to(DEVICE)).square().mean().backward()
    verified = offcompile.reports()[-1].verified
    assert verified is not None and not verified.notes, verified.notes
    assert {phase: bool(rows) for phase, rows in verified.compared.items()} == {
        "forward": True,
        "backward": True,
    }
    assert not verified.differing


def on_a_side_stream(controls: Controls) -> None:
    """A model of the default stream trains on another: memory that its weights leave there may be
    used again at once."""
    found = []
    for compiler in (gpu_checks.plain(), gpu_checks.ours("minimum")):
        torch._dynamo.reset()
        model, side = _stack(), side_stream()
        forward = compiler(model)
        settle()
        with controls.slow(side, DELAYS_US[0]), side:
            loss = forward(torch.ones(512, 64).to(DEVICE)).square().mean()
            loss.backward()
            left = [loss.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]
        settle()
        found.append(left)
    assert any(is_on_host(p) for p in model.parameters())
    assert all(map(torch.equal, *found))


def backward_on_its_own_thread(controls: Controls) -> None:
    """Autograd has a thread for the device, which queues the compiled backward's moves."""
    seen: list[int] = []
    model = gpu_checks.on(BY_NAME["mlp"], DEVICE).fresh()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: seen.append(threading.get_ident()))
    loss = gpu_checks.ours("minimum")(model)(torch.randn(1024, 128).to(DEVICE)).square().mean()
    moves = offcompile.counters()["bytes_in"]
    loss.backward()
    assert seen and threading.get_ident() not in seen
    assert offcompile.counters()["bytes_in"] > moves


# --- orders that are taken away -------------------------------------------------------------------


def _stack(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(64, 64), nn.Tanh()]
    return nn.Sequential(*parts).to(DEVICE)


def _activations_leave() -> list[Tensor]:
    """Two steps at the least memory, and what they leave."""
    torch._dynamo.reset()
    model = _stack()
    forward = gpu_checks.ours("minimum")(model)
    found = []
    for step in range(2):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = forward(x).square().mean()
        loss.backward()
        found.append(loss.detach().cpu())
    found += [p.grad.cpu() for p in model.parameters()]  # type: ignore[union-attr]
    return found


def _updates_beside() -> list[Tensor]:
    """Gradients and weights on the host, updates beside backward."""
    torch._dynamo.reset()
    model = _stack()
    forward = gpu_checks.ours("minimum")(model)
    optimizer = optim.AdamW(model.parameters(), 1e-2, states="host", stream=0.0, overlap=True)
    found = []
    for step in range(3):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(DEVICE)
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach().cpu())
    assert any(is_on_host(p) for p in model.parameters())
    return found + [p.detach().cpu() for p in model.parameters()]


def _updates_of_a_weight_in_place() -> list[Tensor]:
    """The host updates a weight where kernels read it, as soon as its gradient is there."""
    key = RuntimeSettings(target=DEVICE).key
    device = runtime_for(key).device
    weight = nn.Parameter(torch.zeros(1 << 14, device=DEVICE))
    live_on_host(device, [weight])
    carrier = carrier_of(weight)
    assert carrier is not None
    found = []
    for _ in range(3):
        gradient = torch.ones_like(weight)
        ticket = ops.start_store(gradient, "g", "host", "d2h", key)
        seen = (weight.detach() * 1.0).sum()  # queued when the gradient is on its way already
        ops.wait_out(ticket, gradient)
        host = ops.host_of(ticket, tuple(weight.shape), (1,), torch.float32, DEVICE)
        brought = carrier.bring(weight, host, "w")
        brought.arrive()
        carrier.place(weight).add_(brought.gradient)
        carrier.updated(weight, "w")
        carrier.finish()
        found.append(seen.cpu())
    return found


@dataclass(frozen=True)
class Shown:
    """A program that shows that an order is missing where the stream `slow` is slow."""

    program: Callable[[], list[Tensor]]
    slow: str
    plant: Callable[[], AbstractContextManager[Any]]


@contextmanager
def _copies_out_hold_nothing() -> Iterator[None]:
    """Nobody waits for a copy out, and it does not hold its source."""
    issued = CudaDevice._ending

    def and_drop(device: CudaDevice, copy: CudaCopy) -> None:
        if copy.label.direction == "out":
            copy.keep = None
        issued(device, copy)

    with (
        PLANTS["copies out before memory is used again"](),
        mock.patch.object(CudaDevice, "_ending", and_drop),
    ):
        yield


#: the order that is taken away → how it shows
SHOWN_BY = {
    "copies out before memory is used again": Shown(
        _activations_leave, "d2h", _copies_out_hold_nothing
    ),
    **{
        name: Shown(program, slow, PLANTS[name])
        for name, program, slow in (
            ("loads before they are used", _activations_leave, "h2d"),
            ("compute before copies", _activations_leave, "compute"),
            ("gradients before updates", _updates_beside, "d2h"),
            ("readers before weights are updated", _updates_of_a_weight_in_place, "compute"),
        )
    },
}


def _stream(name: str) -> torch.Stream:
    streams = TorchStreams(torch.device(DEVICE))
    found: torch.Stream = streams.compute() if name == "compute" else streams.stream(name)
    return found


def _runs(program: Callable[[], list[Tensor]]) -> list[Tensor] | str:
    """The program's result, or how it failed; frees everything it held."""
    try:
        with deterministic():
            return program()
    except (RuntimeError, OffloadError) as error:
        return str(error)
    finally:
        torch._dynamo.reset()
        gc.collect()
        # the error of a kernel may be one that nobody has heard of yet
        with suppress(RuntimeError):
            settle()
        close_all()


@functools.cache
def _expected(program: Callable[[], list[Tensor]]) -> list[Tensor]:
    found = _runs(program)
    assert not isinstance(found, str), found
    return found


def _right(program: Callable[[], list[Tensor]]) -> bool:
    found, expected = _runs(program), _expected(program)
    return not isinstance(found, str) and all(map(torch.equal, found, expected))


def planted(name: str, controls: Controls) -> None:
    """Without one order, bits are wrong where streams are slow."""
    shown = SHOWN_BY[name]
    _expected(shown.program)
    for delay_us in DELAYS_US:
        with controls.slow(_stream(shown.slow), delay_us), shown.plant():
            if not _right(shown.program):
                return
    raise AssertionError(f"no delay showed the missing order: {name}")


def nothing_planted(controls: Controls) -> None:
    """With all orders in place the same programs are right, whichever streams are slow."""
    for shown in SHOWN_BY.values():
        with controls.slow(_stream(shown.slow), DELAYS_US[0]):
            assert _right(shown.program), f"{shown.program.__name__} with slow {shown.slow}"


# --- all ------------------------------------------------------------------------------------------

LIKE_A_GPU = ("retain_graph", "two_forwards", "accumulation", "no_grad", "dropped_loss")
SEEDS = range(1, 6)
CHECKS: dict[str, Check] = {
    "excess": an_excess_is_planned_away,
    **{check.__name__: check for check in (*OF_THE_DEVICE, touched_by_the_host)},
    "peak": peak_within_the_budget,
    "verified": verified_against_the_plain_run,
    "on_a_side_stream": on_a_side_stream,
    "through_files": through_files,
    "backward_on_its_own_thread": backward_on_its_own_thread,
    **{
        f"bitwise-{s.name}-{seed}": functools.partial(bitwise, s.name, seed)
        for s in ZOO
        for seed in SEEDS
    },
    **{f"least-{s.name}": functools.partial(least, s.name, 4) for s in ZOO},
    **{name: functools.partial(as_on_a_gpu, name) for name in LIKE_A_GPU},
    "nothing_planted": nothing_planted,
    **{f"without {name}": functools.partial(planted, name) for name in SHOWN_BY},
}
