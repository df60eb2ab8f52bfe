"""Copies of weights that live on the host: there beforehand, never stale, never over the limit."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from lengths import some
from simulated import SimulatedDevice
from torch import nn

import offcompile
from offcompile.ir import HOST
from offcompile.passes.correlation.predictor import Predictor
from offcompile.runtime.device import tickets
from offcompile.runtime.moves.activation_cache import ActivationCache
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.registry import runtimes
from offcompile.runtime.moves.saved import Load

NBYTES = 64
LAYERS, PER_LAYER = 4, 2


class Blocks:
    """Blocks with weights on the host, each a graph: all forwards, all backwards, an update."""

    def __init__(self, seed: int, limit: int, mover_of: Callable[..., Mover] = Mover) -> None:
        self.device = SimulatedDevice(seed, longest_pause_s=0.0001)
        self.mover = mover_of(self.device)
        self.keeper = self.mover.keeper = ActivationCache(self.mover, Predictor())
        self.limit = limit
        self.weights = [self.device.addressable([NBYTES] * PER_LAYER) for _ in range(LAYERS)]
        self.seen: list[int] = []
        self.wanted: list[int] = []
        self.most = 0
        self.change(0)

    def change(self, step: int) -> None:
        """Every weight gets another value, as an optimizer does it: in compute's order."""
        for layer, mine in enumerate(self.weights):
            for k, weight in enumerate(mine):
                self.device.compute(_fill(self.value(step, layer, k)), (), (weight,), "update")
                torch.autograd.graph.increment_version(weight)

    def value(self, step: int, layer: int, k: int) -> int:
        return 40 * (step % 6) + 10 * layer + k

    def run(self, phase: str, layer: int, step: int) -> None:
        mine = self.weights[layer]
        self.keeper.enter((phase, layer), self.limit, True, mine, phase == "B")
        self.most = max(self.most, self.keeper.held_bytes)
        for k, weight in enumerate(mine):
            buffer, ticket = self.mover.start_fetch(weight, f"w{k}", "in")
            self.most = max(self.most, self.keeper.held_bytes)
            self.mover.wait_load(tickets.find(ticket, Load))
            self.device.compute(lambda b: self.seen.append(int(b[0])), (buffer,), (), phase)
            self.wanted.append(self.value(step, layer, k))
            del buffer, ticket
        self.keeper.leave()

    def step(self, number: int, train: bool = True) -> None:
        for layer in range(LAYERS):
            self.run("F" if train else "E", layer, number)
        for layer in reversed(range(LAYERS) if train else ()):
            self.run("B", layer, number)

    def end(self) -> None:
        self.device.drain()
        self.mover.sweep()
        assert self.seen == self.wanted
        assert self.device.races == []
        assert self.most <= self.limit
        self.mover.close()

    def moved(self) -> int:
        self.device.drain()
        return self.mover.tally.bytes_in // NBYTES


def _fill(value: int) -> Callable[[np.ndarray], None]:
    def kernel(memory: np.ndarray) -> None:
        memory[:] = value

    return kernel


@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 8])
@pytest.mark.parametrize("seed", some(range(15), *range(5)))
def test_right_numbers_and_no_race_whatever_room_there_is(seed: int, room: int) -> None:
    run = Blocks(seed, room * NBYTES)
    for step in range(4):
        run.step(step)
        run.change(step + 1)
    run.end()


@pytest.mark.parametrize("seed", some(range(15), *range(5)))
def test_evaluation_now_and_then_and_rooms_that_change(seed: int) -> None:
    dice = random.Random(seed)
    run = Blocks(seed, 8 * NBYTES)
    for step in range(6):
        run.limit = 8 * NBYTES
        run.step(step, train=dice.random() < 0.6)
        run.change(step + 1)
        run.limit = dice.randrange(9) * NBYTES
        run.most = 0
        run.step(step + 1, train=dice.random() < 0.6)
    run.end()


def per_step(room: int, steps: int = 4) -> list[int]:
    """Loads, step by step."""
    run, counts = Blocks(0, room * NBYTES), [0]
    for step in range(steps):
        run.step(step)
        run.change(step + 1)
        counts.append(run.moved())
    run.end()
    return [after - before for before, after in pairwise(counts)]


def test_what_forward_fetched_is_there_for_backward_while_there_is_room() -> None:
    each = LAYERS * PER_LAYER
    assert per_step(0) == [2 * each] * 4
    assert per_step(each) == [each] * 4
    assert 2 * each - 4 <= per_step(4)[-1] < 2 * each


@pytest.mark.parametrize("drops", [True, False])
def test_a_step_that_fetches_none_through_the_keeper_drops_copies(drops: bool) -> None:
    """A replayed graph begins no sweep; after it, weights change in ways that nobody counts."""
    run = Blocks(0, 8 * NBYTES)
    for step in range(2):
        run.step(step)
        run.change(step + 1)
    run.run("F", 0, 2)
    assert run.keeper.held_bytes >= 2 * PER_LAYER * NBYTES  # those of the next block too
    if drops:
        run.keeper.drop_weights()
        assert run.keeper.held_bytes == 0
    for k, weight in enumerate(run.weights[1]):
        run.device.compute(_fill(run.value(3, 1, k)), (), (weight,), "update")
    run.run("F", 1, 3)
    if drops:
        run.end()
        return
    run.device.drain()
    assert run.seen != run.wanted and run.device.races
    run.mover.close()


def test_the_next_blocks_are_fetched_before_they_run() -> None:
    run = Blocks(0, 4 * NBYTES)
    for step in range(3):
        run.step(step)
        run.change(step + 1)
    counters = run.keeper.foresight.counters
    before = counters.misses
    run.step(3)
    # the first block of a step comes on demand: its weights have just changed
    assert counters.misses - before <= PER_LAYER
    assert counters.wasted_bytes == 0
    run.end()


def test_nothing_is_fetched_for_the_step_after_an_update() -> None:
    run = Blocks(0, 100 * NBYTES)
    for step in range(3):
        run.step(step)
        run.change(step + 1)
    assert run.keeper.foresight.counters.wasted_bytes == 0
    assert per_step(100) == [LAYERS * PER_LAYER] * 4
    run.end()


# --- in real runs ---------------------------------------------------------------------------------

WIDTH, STACK, BUDGET = 96, 6, 2_600_000


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def run_blocks(policy: str | None, steps: int) -> tuple[list[torch.Tensor], list[ActivationCache]]:
    """Losses, outputs of evaluations between the steps, and weights; None: not compiled."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(Block() for _ in range(STACK))
    stem = torch.ones(WIDTH, requires_grad=True)  # so that no block is unlike the others
    if policy is not None:
        options = {"memory": BUDGET, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.02}
        options["policy"] = policy
        for block in blocks:  # the same options: one graph with many sets of weights
            block.compile(backend="offcompile", options=options)
    found: list[torch.Tensor] = []
    keepers: list[ActivationCache] = []
    for step in range(steps):
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step))
        y = x * stem
        for block in blocks:
            y = block(y)
        y.square().mean().backward()
        with torch.no_grad():
            for k, p in enumerate(blocks.parameters()):
                assert p.grad is not None
                if k % 2:  # half of them so that autograd does not see it
                    p.data.sub_(p.grad, alpha=0.1)
                else:
                    p.sub_(p.grad, alpha=0.1)
                p.grad = None
            for _ in range(2):
                z = x
                for block in blocks:
                    z = block(z)
                blocks[-1].up.weight.data.mul_(1.01)
                found.append(z)
        found.append(y.detach())
        keepers = [r.mover.keeper for r in runtimes() if r.mover.keeper is not None]
        assert all(k.held_bytes <= k.limit_bytes for k in keepers)
    found += [p.detach().clone() for p in blocks.parameters()]
    return found, keepers


@pytest.mark.parametrize("policy", some(["joint", "gradient_reserve"], "joint"))
def test_blocks_whose_weights_do_not_fit_give_what_they_give_plainly(policy: str) -> None:
    torch._dynamo.reset()
    expected, _ = run_blocks(None, 4)
    found, keepers = run_blocks(policy, 4)
    for mine, plain in zip(found, expected, strict=True):
        assert torch.equal(mine, plain)
    assert any(t.home == HOST for r in offcompile.reports() for t in r.problem.tensors)
    assert any(k.foresight.counters.touches for k in keepers)
    gc.collect()
    torch._dynamo.reset()
