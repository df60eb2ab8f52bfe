"""Blocks compiled one by one, in budgets so tight that nothing may stand at the turn, and called in
ways that nobody can foresee: checkpoints, experts that the data chooses, lengths that change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hand_sgd import step_by_hand
from lengths import some
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offcompile
from offcompile.ir import DEVICE, HOST, Lane, Machine, Op, Problem, Tier
from offcompile.ir import Tensor as Stored
from offcompile.planning.empty_turn import decide_emptied, keeping_at_most, kept_at_turn
from offcompile.planning.fit_budget import Decided, PlanSearch, fit_budget
from offcompile.planning.order import RunStep
from offcompile.runtime.base.counters import reset_counters
from offcompile.runtime.moves.registry import close_all

MIB = 1 << 20
WIDTH, HEADS, LAYERS, BATCH, LENGTH = 64, 4, 3, 4, 128
Run_ = Callable[["Model", Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        seen = (q @ k.transpose(-1, -2) * (w // HEADS) ** -0.5).softmax(-1) @ v
        x = x + seen.transpose(1, 2).reshape(b, t, w)
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.stem = nn.Parameter(torch.ones(WIDTH))  # so that no block is unlike the others


def straight(model: Model, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def checkpointed(reentrant: bool) -> Run_:
    def run(model: Model, x: Tensor) -> Tensor:
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return run


def routed(model: Model, x: Tensor) -> Tensor:
    """Three experts, as the data say."""
    for i in range(3):
        choice = int(x.detach().double().sum().abs().mul(1e4)) + i
        x = model.blocks[choice % LAYERS](x)
    return x


def with_eval(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        straight(model, x + 1)
    return straight(model, x)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    reset_counters()
    yield
    torch._dynamo.reset()
    close_all()


def train(
    run: Run_, memory: float | None, spill: Path, lengths: tuple[int, ...], dynamic: bool | None
) -> list[str]:
    """Losses and gradients of three steps, as exact text; without `memory`, plainly compiled."""
    torch.manual_seed(0)
    model, found = Model(), []
    options = {"lowering": "aot_eager", "spill": str(spill), "seconds": 0.1}
    for block in model.blocks:
        if memory is None:
            block.compile(backend="aot_eager", dynamic=dynamic)
        else:
            options["memory"] = int(memory * MIB)
            block.compile(backend="offcompile", options=options, dynamic=dynamic)
    for step in range(3):
        dice = torch.Generator().manual_seed(step)
        x = torch.randn(BATCH, lengths[step % len(lengths)], WIDTH, generator=dice)
        loss = run(model, x * model.stem).square().mean()
        loss.backward()
        found.append(float(loss.detach()).hex())
        found += step_by_hand(model.parameters())
    torch._dynamo.reset()
    return found


WAYS: dict[str, tuple[Run_, float, tuple[int, ...], bool | None]] = {
    "tight": (straight, 5.5, (LENGTH,), None),
    "checkpoint": (checkpointed(False), 5.5, (LENGTH,), None),
    "reentrant checkpoint": (checkpointed(True), 5.5, (LENGTH,), None),
    "experts": (routed, 5.5, (LENGTH,), None),
    "lengths": (straight, 6.0, (LENGTH, 96, LENGTH), False),
    "lengths, one graph": (straight, 6.0, (LENGTH, 96, LENGTH), None),
}


@pytest.mark.parametrize("way", some(WAYS, "checkpoint", "lengths, one graph"))
def test_the_numbers_of_the_plain_run_in_little_memory(tmp_path: Path, way: str) -> None:
    run, memory, lengths, dynamic = WAYS[way]
    wanted = train(run, None, tmp_path, lengths, dynamic)
    assert train(run, memory, tmp_path, lengths, dynamic) == wanted
    counted = offcompile.counters()
    assert counted["bytes_out"] > 0
    assert counted["keeper_bytes"] == counted["live_tickets"] == 0


SAVED = ("a", "b", "c")


def chain() -> Problem:
    """Save three tensors of 3 bytes each for backward. Alone the step takes 10."""
    forward = [
        Op(f"f{t}", "forward", 1.0, (*SAVED[i - 1 : i],), (t,), 1) for i, t in enumerate(SAVED)
    ]
    backward = [Op(f"g{t}", "backward", 1.0, (t,), (), 1) for t in reversed(SAVED)]
    return Problem((*(Stored(t, 3, "activation") for t in SAVED),), (*forward, *backward))


def search_quickly() -> PlanSearch:
    def machine(nbytes: int) -> Machine:
        lanes = (Lane("out", DEVICE, HOST, 10.0), Lane("in", HOST, DEVICE, 10.0))
        return Machine((Tier(DEVICE, nbytes), Tier(HOST, None)), lanes)

    return PlanSearch(machine, lambda budget: 0, "joint", 0.1)


def ran(found: Decided) -> list[str]:
    assert len(found.order.device_bytes) == len(chain().ops)
    return [s.name for s in found.order.steps if isinstance(s, RunStep)]


def test_nothing_that_may_leave_stands_at_the_turn() -> None:
    """Within 8 the planner alone would keep two of them at the turn."""
    problem = chain()
    found = decide_emptied(problem, search_quickly(), 8)
    assert found.kept == frozenset()
    assert found.order.peak_bytes <= 8
    assert ran(found) == [op.id for op in problem.ops]
    assert {m.tensor for m in found.result.plan.moves} == set(SAVED)


def test_no_more_stays_at_the_turn_than_may() -> None:
    problem, search = chain(), search_quickly()
    alone = fit_budget(problem, search, 8)
    kept = len(kept_at_turn(problem, alone.result.timeline))
    assert kept == 2
    assert keeping_at_most(3 * kept, problem, search, 8, alone) is alone
    for keeps_bytes, stay in ((5, 1), (3, 1), (2, 0), (0, 0)):
        found = keeping_at_most(keeps_bytes, problem, search, 8, alone)
        assert found.kept is not None and len(found.kept) == stay
        assert found.order.peak_bytes <= 8
        assert ran(found) == [op.id for op in problem.ops]


def test_tensors_that_cannot_leave_are_part_of_what_may_stay() -> None:
    problem, search = chain(), search_quickly()
    *others, last = problem.tensors
    pinned = replace(problem, tensors=(*others, replace(last, pinned=True)))
    alone = fit_budget(pinned, search, 8)
    found = keeping_at_most(5, pinned, search, 8, alone)
    assert found.kept == {"c"}
