"""The checks of captured steps, on the asynchronous device under delays."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest import mock

import budget_child
import capture_checks
import capture_weights
import torch
from async_device import Controls
from async_own_checks import DELAYS_US, DEVICE, MIB, settle
from async_planted import stream_of
from capture_checks import REPLAYED, USUAL
from gpu_checks import deterministic, on, plain

from offcompile.machine import target
from offcompile.machine.options import Options
from offcompile.run.replay import step_graph

ALL = capture_checks.CHECKS | capture_weights.CHECKS
ALL_PLANTED = capture_checks.PLANTED | capture_weights.PLANTED
SEEDS = {
    "gpt": 1,
    "encoder": 2,
    "accumulation": 3,
    **{name: seed for seed, name in enumerate(capture_weights.CHECKS, 4)},
}
#: other delays for one of each kind of plan
MORE_SEEDS = range(20, 24)
#: the device replays what a lane was given on a stream of this number beyond the lane's own
BRANCHES = 64
#: workspaces of two threads on Hopper
LIBRARY_BYTES = 64 * MIB


def seeded(check: Callable[[str], None], seed: int, controls: Controls) -> None:
    controls.seed(seed)
    try:
        check(DEVICE)
    finally:
        controls.seed(0)


def beside_libraries(check: Callable[[str], None], controls: Controls) -> None:
    """As on a card, where libraries hold more memory than all tensors of these models take."""

    def with_libraries(options: Options, device: torch.device) -> target.CudaTarget:
        return replace(accelerator_target(options, device), library_bytes=LIBRARY_BYTES)

    accelerator_target = target._accelerator_target
    with (
        mock.patch.object(target, "_accelerator_target", with_libraries),
        # nothing takes them here, so pools seem to take more than is there
        mock.patch.object(step_graph, "check_room", lambda *asked: None),
    ):
        seeded(check, 50, controls)


def planted(name: str, controls: Controls) -> None:
    """It shows where lanes are slow enough, on a machine that may itself be slow."""
    lanes = [BRANCHES + stream_of(lane).stream_id for lane in ("d2h", "h2d")]
    for delay_us in DELAYS_US:
        with ExitStack() as stack:
            for number in lanes:
                branch = types.SimpleNamespace(stream_id=number)
                stack.enter_context(controls.slow(branch, delay_us))  # type: ignore[arg-type]
            if capture_checks.shows(ALL_PLANTED[name], DEVICE):
                return
    raise AssertionError(f"nothing shows that {name} are missing")


def peak_of_weights(device: str) -> None:
    """By the allocator: what a captured step holds with weights on the host, its pool included."""
    specimen = on(budget_child.deep_mlp(256, 256, 10), device)

    def run(compiler: Callable[..., Any]) -> tuple[list[torch.Tensor], int, int]:
        torch._dynamo.reset()
        gc.collect()
        settle()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        model, losses = specimen.fresh(), []
        optimizer, forward = torch.optim.SGD(model.parameters(), 0.1), compiler(model)
        for step in range(USUAL + REPLAYED):
            loss = specimen.loss(forward(*specimen.inputs(step)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().cpu())
            del loss
        settle()
        peak, now = torch.accelerator.max_memory_allocated(), torch.accelerator.memory_allocated()
        return losses, peak - before, now - before

    with deterministic(), capture_checks.seen() as found:
        expected, plain_bytes, _ = run(plain())
        budget = int(0.4 * plain_bytes) + MIB
        losses, peak, stays = run(capture_checks.captured(budget))
        pools = sum(one.pool_bytes for one in found.made)
    assert all(map(torch.equal, losses, expected))
    assert found.replays == 2 * REPLAYED, (found.replays, found.refusals)
    assert capture_weights.left_by(found)[0], "no weight lives on the host"
    assert peak <= budget, f"{peak} bytes were given out of {budget}"
    assert pools > 0 and stays + pools <= budget, f"{stays} and {pools} stay of {budget}"


CHECKS = {
    **{
        f"captured {name}": functools.partial(seeded, check, SEEDS.get(name, 0))
        for name, check in ALL.items()
    },
    **{
        f"captured {name}-{seed}": functools.partial(seeded, ALL[name], seed)
        for name in ("gpt", "weights of an mlp", "weights, half way", "weights, accumulation")
        for seed in MORE_SEEDS
    },
    **{
        f"captured {name}, beside libraries": functools.partial(beside_libraries, ALL[name])
        for name in ("gpt", "weights, half way", "weights, little_room_on_the_host")
    },
    "captured peak": functools.partial(seeded, peak_of_weights, 40),
}
PLANTED = {f"captures without {name}": functools.partial(planted, name) for name in ALL_PLANTED}
