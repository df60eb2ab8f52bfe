"""Checks of training on the asynchronous device, which `async_child.py` runs."""

from __future__ import annotations

import functools
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import async_captures
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
    touched_by_the_host,
)
from async_planted import ALWAYS, SHOWN_BY, nothing_planted, on_a_side_stream, planted, stream_of
from async_seeds import BLOCKS, FEW, many
from async_states import CHECKS as OF_STATES
from gpu_checks import deterministic
from torch import Tensor, nn
from zoo import BY_NAME, ZOO

import offcompile
from offcompile import Infeasible
from offcompile.machine import target
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.registry import RuntimeSettings, close_all, runtime_for

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
    large = gpu_checks.on(budget_child.deep_mlp(512, 128, 6), DEVICE)

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
    peaks, budget = _planned_again("planned again for so much less", layers, nn.Identity())
    assert peaks[1] > budget, "the workspace fits, so that this shows nothing"


def a_loss_outside_is_planned_for(controls: Controls) -> None:
    """From the second step on, what the program holds between forward and backward is left to it,
    though no graph has it."""
    layers = [m for _ in range(8) for m in (nn.Linear(256, 256), nn.Tanh())]
    peaks, budget = _planned_again("planned again with that much room", layers, Working())
    assert max(peaks[1:]) <= budget, f"{peaks} of {budget}"


class Apart(nn.Module):
    """Layers, and a loss in a graph of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(m for _ in range(8) for m in (nn.Linear(256, 256), nn.Tanh()))
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        torch._dynamo.graph_break()
        return y.exp().sin().square().mean()


def a_graph_around_a_loss_leaves_it_room(controls: Controls) -> None:
    """Two graphs, of which the small one runs between the halves of the other, keep the budget."""
    model, x = Apart().to(DEVICE), torch.randn(2048, 256).to(DEVICE)

    def run(compiled: Any) -> tuple[list[str], int]:
        losses, peak = [], 0
        for _ in range(5):
            settle()
            torch.accelerator.reset_peak_memory_stats()
            loss = compiled(x)
            loss.backward()
            losses += [float(loss).hex(), *(float(p.grad.sum()).hex() for p in model.parameters())]
            model.zero_grad()
            del loss
            settle()
            peak = torch.accelerator.max_memory_allocated()
        return losses, peak

    with deterministic(), seeded(controls, 2):
        expected, plain_bytes = run(torch.compile(model, backend="aot_eager"))
        torch._dynamo.reset()
        settle()
        options = {"memory": int(0.7 * plain_bytes), "lowering": "aot_eager"}
        losses, peak = run(torch.compile(model, backend="offcompile", options=options))
    assert losses == expected
    assert peak <= options["memory"], f"{peak} of {options['memory']}"
    said = [line for report in offcompile.reports() for line in report.profile.said]
    assert any("that graphs between forward and backward take" in line for line in said), said


def _planned_again(reason: str, layers: list[nn.Module], loss: nn.Module) -> tuple[list[int], int]:
    """Train at 0.8 times plain's peak: the first steps may take more, and later ones do not.
    Returns the peaks of the steps, and the budget."""
    model = nn.Sequential(*layers).to(DEVICE)
    x = torch.randn(2048, 256).to(DEVICE)

    def step(run: Any) -> int:
        settle()
        torch.accelerator.reset_peak_memory_stats()
        loss(run(x)).sum().backward()
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
    assert peaks[-1] <= budget, f"{peaks} of {budget}"
    said = offcompile.reports()[-1].profile.said
    assert sum(reason in line for line in said) == 1, said
    return peaks, budget


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


def a_full_host_tier_waits_for_copies(controls: Controls) -> None:
    """Memory for a result is there once the copies that hold it are over."""
    key = RuntimeSettings(target=DEVICE, host_bytes=MIB).key
    mover, nbytes = runtime_for(key).mover, 3 * MIB // 4
    x = torch.full((nbytes,), 7, dtype=torch.uint8, device=DEVICE)
    saved = ops.start_out(x, "x", "host", "d2h", key)
    ops.wait_out(saved, x)
    mover.device.drain()
    with controls.slow(stream_of("h2d"), DELAYS_US[1]):
        load = ops.start_load(saved, (nbytes,), (1,), torch.uint8, "x", "h2d", [], DEVICE)
        del saved
        (host,) = mover.device.addressable([nbytes])
    host.fill_(1)
    assert bool((ops.wait_load(*load) == 7).all().cpu())
    del load, host
    settle()
    close_all()


def graphs_share_a_small_host_tier(halves_of_all: tuple[int, ...], controls: Controls) -> None:
    """Two graphs of one step plan for a host tier that has no room for both, whatever it holds:
    so many halves of the weights."""
    torch.manual_seed(0)
    layers = [nn.Linear(256, 256) for _ in range(6)]
    weights = sum(p.nbytes for layer in layers for p in layer.parameters())
    start = [p.detach().clone() for layer in layers for p in layer.parameters()]
    halves = [nn.Sequential(*layers[:3]).to(DEVICE), nn.Sequential(*layers[3:]).to(DEVICE)]
    parameters = [p for half in halves for p in half.parameters()]
    batch = torch.randn(64, 256).to(DEVICE)

    def trained(wrap: Any) -> list[Tensor]:
        with torch.no_grad():
            for p, value in zip(parameters, start, strict=True):
                p.copy_(value)
        first, second = map(wrap, halves)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            second(first(batch)).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu().clone() for p in parameters]

    with deterministic(), seeded(controls, 5):
        expected = trained(gpu_checks.plain())
        for halves_of_weights in halves_of_all:
            limit = halves_of_weights * weights // 2
            options = {
                "memory": "minimum",
                "lowering": "aot_eager",
                "host_memory": limit,
                "seconds": 0.2,
            }
            moved, before = offcompile.counters()["bytes_out"], len(offcompile.reports())
            found = trained(functools.partial(torch.compile, backend="offcompile", options=options))
            assert all(map(torch.equal, found, expected)), limit
            made = offcompile.reports()[before:]
            peaks = [report.timeline.peak_bytes.get("host", 0) for report in made]
            assert len(made) == 2 and sum(peaks) <= limit, (limit, peaks)
            assert offcompile.counters()["bytes_out"] > moved
            torch._dynamo.reset()
            gc.collect()


def a_host_without_room_is_named(controls: Controls) -> None:
    """Plans take no more of the host than this machine has, and a refusal says so."""
    del controls
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(8)]).to(DEVICE)
    options = {"lowering": "aot_eager", "seconds": 0.2}
    kept = target.default_limit_bytes
    target.default_limit_bytes = lambda: MIB // 2
    try:
        forward = torch.compile(model, backend="offcompile", options={"memory": 3 * MIB, **options})
        forward(torch.randn(64, 256).to(DEVICE))
    except Infeasible as refusal:
        said = str(refusal)
    else:
        said = offcompile.reports()[-1].to_text()
    finally:
        target.default_limit_bytes = kept
    assert "this machine's memory leaves 524,288 bytes" in said, said


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


# --- all ------------------------------------------------------------------------------------------

LIKE_A_GPU = ("retain_graph", "two_forwards", "accumulation", "no_grad", "dropped_loss")
SEEDS = range(1, 6)
PLANTED_SEEDS = range(10)
CHECKS: dict[str, Check] = {
    "excess": an_excess_is_planned_away,
    "loss_outside": a_loss_outside_is_planned_for,
    "loss_apart": a_graph_around_a_loss_leaves_it_room,
    **{check.__name__: check for check in (*OF_THE_DEVICE, touched_by_the_host)},
    "peak": peak_within_the_budget,
    "verified": verified_against_the_plain_run,
    "on_a_side_stream": on_a_side_stream,
    "through_files": through_files,
    "shared_host_tier": functools.partial(graphs_share_a_small_host_tier, (2,)),
    "shared_host_tier, other limits": functools.partial(graphs_share_a_small_host_tier, (1, 3)),
    "host_without_room": a_host_without_room_is_named,
    "full_host_tier": a_full_host_tier_waits_for_copies,
    "own_thread": backward_on_its_own_thread,
    **{
        f"bitwise-{s.name}-{seed}": functools.partial(bitwise, s.name, seed)
        for s in ZOO
        for seed in SEEDS
    },
    **{f"least-{s.name}": functools.partial(least, s.name, 4) for s in ZOO},
    **{name: functools.partial(as_on_a_gpu, name) for name in LIKE_A_GPU},
    **{block: functools.partial(many, *asked) for block, asked in (BLOCKS | FEW).items()},
    "nothing_planted": functools.partial(nothing_planted, tuple(SHOWN_BY)),
    "nothing_planted, few": functools.partial(nothing_planted, ALWAYS),
    **OF_STATES,
    **async_captures.CHECKS,
    **async_captures.PLANTED,
    **{
        f"without {name}" + (f"-{seed}" if seed else ""): functools.partial(planted, name, seed)
        for name in SHOWN_BY
        for seed in PLANTED_SEEDS
    },
}
