"""Several graphs under one budget: blocks compiled one by one, and graph breaks; same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lengths import some
from mlp_block import WIDTH, Block
from torch import Tensor, nn

import offcompile
from offcompile.run.accounts.step_plan import StepPlanner
from offcompile.runtime.base.counters import reset_counters
from offcompile.runtime.moves.registry import close_all, runtimes

LAYERS, BATCH, LENGTH = 6, 4, 512


class Stack(nn.Module):
    """Blocks and a head; the graph breaks before the blocks in `breaks`."""

    def __init__(self, breaks: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head, self.breaks = nn.Linear(WIDTH, 16), breaks

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i in self.breaks:
                torch._dynamo.graph_break()
            x = block(x)
        return self.head(x).square().mean()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    reset_counters()
    yield
    torch._dynamo.reset()
    close_all()


def inputs(step: int, length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, WIDTH, generator=torch.Generator().manual_seed(step))


Step = Callable[[Callable[[Tensor], Tensor], int], Tensor]


def one_loss(forward: Callable[[Tensor], Tensor], step: int) -> Tensor:
    loss = forward(inputs(step))
    loss.backward()
    return loss


def train(model: Stack, forward: Any, steps: int, each: Step = one_loss) -> list[str]:
    """Losses and all gradients, as exact text."""
    seen = []
    for step in range(steps):
        loss = each(forward, step)
        seen.append(float(loss.detach()).hex())
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                seen.append(float(p.grad.double().sum()).hex())
                p.sub_(p.grad, alpha=0.1)
                p.grad = None
    return seen


def fresh_model(breaks: tuple[int, ...] = ()) -> Stack:
    torch.manual_seed(0)
    return Stack(breaks)


def by_blocks(model: Stack, memory: int, spill: Path, lowering: str = "aot_eager") -> Stack:
    options = {"memory": memory, "lowering": lowering, "spill": str(spill), "seconds": 0.1}
    for block in model.blocks:
        block.compile(backend="offcompile", options=options)
    return model


def plainly(steps: int, each: Step = one_loss, lowering: str = "aot_eager") -> list[str]:
    model = fresh_model()
    for block in model.blocks:
        block.compile(backend=lowering)
    seen = train(model, model, steps, each)
    torch._dynamo.reset()
    return seen


MIB = 1 << 20
#: all that the blocks keep for backward is some 30 MiB; a block alone needs 8
ROOMY, TIGHT = 96 * MIB, 16 * MIB


def left_and_returned() -> tuple[int, int]:
    counted = offcompile.counters()
    return int(counted["bytes_out"]), int(counted["bytes_in"])


#: `test_other_ways_of_training_are_exact_too` is alike with aot_eager
@pytest.mark.parametrize("lowering", some(["aot_eager", "inductor"], "inductor"))
def test_blocks_in_little_memory_are_bitwise_the_plain_run(tmp_path: Path, lowering: str) -> None:
    wanted = plainly(4, lowering=lowering)
    memory = TIGHT if lowering == "aot_eager" else 24 * MIB  # kernels hold what ops give back
    model = by_blocks(fresh_model(), memory, tmp_path, lowering)
    assert train(model, model, 4) == wanted
    out, back = left_and_returned()
    assert out > 0 and back > 0


def test_where_all_fits_nothing_moves_and_no_graph_is_touched(tmp_path: Path) -> None:
    wanted = plainly(3)
    before = len(offcompile.reports())
    model = by_blocks(fresh_model(), ROOMY, tmp_path)
    assert train(model, model, 3) == wanted
    assert left_and_returned() == (0, 0)
    assert all(report.fits for report in offcompile.reports()[before:])


def test_graph_breaks_share_the_budget(tmp_path: Path) -> None:
    wanted = plainly(4)
    model = fresh_model(breaks=(2, 4))
    options = {"memory": 24 * MIB, "lowering": "aot_eager", "spill": str(tmp_path)}
    forward = torch.compile(model, backend="offcompile", options=options)
    assert train(model, forward, 4) == wanted
    assert left_and_returned()[0] > 0


def test_only_what_does_not_fit_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # ops that run again instead of moves would be another measure
    monkeypatch.setattr(StepPlanner, "save_less", lambda planner, step: None)
    moved = []
    for memory in (TIGHT, 24 * MIB, 32 * MIB):
        model = by_blocks(fresh_model(), memory, tmp_path)
        train(model, model, 3)
        before = left_and_returned()[0]
        train(model, model, 2)
        moved.append(left_and_returned()[0] - before)
        torch._dynamo.reset()
        close_all()
    assert moved[0] > moved[1] > moved[2]


def kept_bytes() -> int:
    return sum(r.mover.keeper.held_bytes for r in runtimes() if r.mover.keeper is not None)


def live_tickets() -> int:
    return int(offcompile.counters()["live_tickets"])


def retained(forward: Callable[[Tensor], Tensor], step: int) -> Tensor:
    loss = forward(inputs(step))
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_batches(forward: Callable[[Tensor], Tensor], step: int) -> Tensor:
    """Both forwards before either backward."""
    first, second = forward(inputs(2 * step)), forward(inputs(2 * step + 1))
    first.backward()
    second.backward()
    return first + second


def with_eval(forward: Callable[[Tensor], Tensor], step: int) -> Tensor:
    if step % 2:
        with torch.no_grad():
            forward(inputs(100 + step))
    return one_loss(forward, step)


def dropped(forward: Callable[[Tensor], Tensor], step: int) -> Tensor:
    forward(inputs(100 + step))  # nobody asks for its gradients
    return one_loss(forward, step)


@pytest.mark.parametrize("each", some([retained, two_batches, with_eval, dropped], two_batches))
def test_other_ways_of_training_are_exact_too(tmp_path: Path, each: Step) -> None:
    wanted = plainly(3, each)
    memory = TIGHT + (4 * MIB if each is two_batches else 0)
    model = by_blocks(fresh_model(), memory, tmp_path)
    assert train(model, model, 3, each) == wanted
    assert left_and_returned()[0] > 0
    assert kept_bytes() == 0
    assert live_tickets() == 0
