"""A graph around a small one, such as that of a loss, has a plan of its own that leaves it room at
the turn; where graphs take much, the keeper decides what moves."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hand_sgd import step_by_hand
from mlp_block import WIDTH, Block
from torch import Tensor, nn

import offcompile
from offcompile.run.accounts.outside import GapPeaks, OutsideTensors
from offcompile.run.accounts.usage import ParameterSet, PendingBackward
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.registry import runtimes

MIB = 1 << 20
LAYERS, ROWS, CLASSES, STEPS = 6, 2048, 256, 6
#: what allocations of other things may come to
OTHERS_BYTES = 1 * MIB
SAID = "that graphs between forward and backward take"


pytestmark = pytest.mark.usefixtures("fresh_compiler")


measured: list[int] = []


@torch.library.custom_op("offcompile_tests::measured_copy", mutates_args=())
def measured_copy(x: Tensor) -> Tensor:
    """A copy; measures what malloc has handed out."""
    measured.append(heap().live_bytes())
    return x.clone()


measured_copy.register_fake(torch.empty_like)
measured_copy.register_autograd(lambda ctx, grad: measured_copy(grad))


class Model(nn.Module):
    """Blocks and a head; the graph breaks before the blocks in `breaks`, and before the loss."""

    def __init__(self, breaks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.breaks = breaks

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i in self.breaks:
                torch._dynamo.graph_break()
            x = block(x)
        logits = self.head(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(measured_copy(logits), targets)


def train(model: Model, compiled: Callable[..., Tensor]) -> tuple[list[str], int]:
    """Losses and gradients as exact text, and the most measured in the last two steps: the weights,
    and what was held beyond what the process held before."""
    seen = []
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        targets = torch.arange(ROWS) % CLASSES
        gc.collect()
        if step == STEPS - 2:
            measured.clear()
            before = heap().live_bytes()
        loss = compiled(x, targets)
        loss.backward()
        seen.append(float(loss.detach()).hex())
        seen += step_by_hand(model.parameters())
        del loss
    return seen, max(measured) - before + sum(p.nbytes for p in model.parameters())


def within(memory: int | None, spill: Path, breaks: tuple[int, ...] = ()) -> tuple[list[str], int]:
    """Train within a budget; None: plainly."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model(breaks)
    if memory is None:
        return train(model, torch.compile(model, backend="aot_eager"))
    options = {"memory": memory, "lowering": "aot_eager", "spill": str(spill)}
    return train(model, torch.compile(model, backend="offcompile", options=options))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], int]:
    return within(None, tmp_path_factory.mktemp("spill"))


def test_a_graph_around_a_small_one_moves_what_its_own_plan_says(
    plain: tuple[list[str], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="offcompile")
    losses, held = plain
    budget, before = held * 3 // 4, len(offcompile.reports())
    mine, mine_held = within(budget, tmp_path)
    assert mine == losses
    assert mine_held <= budget + OTHERS_BYTES
    assert len([m for m in caplog.messages if SAID in m]) == 1
    # the last plan made is the one that runs: no keeper decides what moves, and no step is planned
    made = offcompile.reports()[before:]
    _, newest = (r for r in made if r.name.startswith(made[0].name))
    assert newest.plan.moves or newest.plan.recomputes
    keepers = [r.mover.keeper for r in runtimes() if r.mover.keeper is not None]
    assert all(keeper.held_bytes == 0 and keeper.steps.newest is None for keeper in keepers)


def test_a_graph_that_leaves_room_as_it_is_is_compiled_once(
    plain: tuple[list[str], int], tmp_path: Path
) -> None:
    losses, held = plain
    before = len(offcompile.reports())
    assert within(4 * held, tmp_path)[0] == losses
    graph, loss = offcompile.reports()[before:]
    assert not (graph.plan.moves or loss.plan.moves)


def test_graphs_that_take_much_leave_it_to_the_keeper(
    plain: tuple[list[str], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="offcompile")
    losses, held = plain
    mine, _ = within(held * 5 // 8, tmp_path, breaks=(2, 4))
    assert mine == losses
    assert not [m for m in caplog.messages if SAID in m]


def test_what_runs_while_a_forward_waits_counts_beside_what_newer_ones_would_leave() -> None:
    device, outer = OutsideTensors(), PendingBackward(ParameterSet(()), 0, 100)
    device.waits(outer)
    device.holds(30)
    inner = PendingBackward(ParameterSet(()), 5, 25)
    device.waits(inner)
    device.holds(10)
    assert (outer.amid_bytes, inner.amid_bytes) == (35, 10)
    device.holds(50, own=inner)  # its backward, whose plan counts what it left
    assert (outer.amid_bytes, inner.amid_bytes) == (50, 10)
    inner.waiting = False
    device.holds(60)
    assert (outer.amid_bytes, inner.amid_bytes) == (60, 10)


def test_new_sizes_count_like_those_seen() -> None:
    peaks = GapPeaks()
    assert peaks.amid_bytes((1,)) is None
    peaks.note_amid((1,), 10)
    peaks.note_amid((2,), 30)
    assert [peaks.amid_bytes(sizes) for sizes in ((1,), (2,), (3,))] == [10, 30, 30]
