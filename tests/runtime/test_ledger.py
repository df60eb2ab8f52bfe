"""One ledger for the process: what the compiled graphs of several models hold on one device."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import offcompile
from offcompile.passes.correlation.learned import LearnedLimits
from offcompile.run.accounts.process import process
from offcompile.run.accounts.usage import DeviceUsage, GraphUsage
from offcompile.runtime.base.counters import reset_counters
from offcompile.runtime.moves.registry import close_all, runtimes
from offcompile.runtime.states.updates import count

CPU = torch.device("cpu")


class Tower(nn.Module):
    """Keeps 64 KiB a layer for backward at a batch of 256, beside 16 KiB of weights."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    gc.collect()
    reset_counters()
    yield
    torch._dynamo.reset()
    close_all()


def compiled(model: nn.Module, memory: int | str, spill: Path) -> nn.Module:
    options = {"memory": memory, "lowering": "aot_eager", "spill": str(spill)}
    model.compile(backend="offcompile", options=options)
    return model


def held_now() -> int:
    """Counts the bytes that all graphs of the CPU hold between two steps."""
    gc.collect()
    usage = process.usage_of(CPU)
    stranger = usage.open()
    usage.invalidate()
    return usage.held_beside(stranger, stranger.bind([])).now


def bytes_of(model: nn.Module) -> int:
    return sum(p.untyped_storage().nbytes() for p in model.parameters())


# --- the usage themselves -----------------------------------------------------------------------


def parameter(numel: int = 16) -> nn.Parameter:
    return nn.Parameter(torch.zeros(numel))


def test_what_is_held_beside_a_graph_follows_what_happens_to_weights_and_gradients() -> None:
    usage = DeviceUsage()
    mine, theirs = usage.open(), usage.open()
    a, b = parameter(), parameter(32)
    binding = mine.bind([a])
    theirs.bind([b])

    def beside() -> int:
        usage.invalidate()
        return usage.held_beside(mine, binding).now

    assert beside() == 128
    b.grad = torch.zeros(32)
    assert beside() == 256
    a.grad = torch.zeros(16)  # a new one will be added to it
    assert beside() == 320
    b.grad = None
    assert beside() == 192
    b.data = torch.zeros(64)
    assert beside() == 320
    del b
    assert beside() == 64
    a.grad = None
    assert beside() == 0


def test_gradients_that_come_between_the_halves_count_once_that_is_known() -> None:
    usage = DeviceUsage()
    first, second = usage.open(), usage.open()
    a, b = parameter(), parameter()
    outer, inner = first.bind([a]), second.bind([b])
    first.trains = second.trains = True
    x = torch.ones(1, requires_grad=True)
    outputs = [x * 2, x * 3]
    assert first.begin(outputs[0], outer, 8, 8) is not None
    assert second.begin(outputs[1], inner, 4, 4) is not None
    usage.invalidate()
    assert usage.held_beside(first, outer) == (64 + 8 + 4, 64 + 8 + 4)
    second.end()
    first.end()
    assert usage.held_beside(first, outer) == (64, 128)
    assert usage.held_beside(second, inner) == (64, 64)


def test_a_graph_that_is_gone_is_in_no_books_and_a_pass_dies_with_its_outputs() -> None:
    usage = DeviceUsage()
    gone, stays = usage.open(), usage.open()
    p, x = parameter(), torch.ones(1, requires_grad=True)
    binding = gone.bind([p])
    out = x * 2
    gone.begin(out, binding, 10, 30)
    assert usage.unmoved_bytes() == 20 and usage.entries() == [gone, stays]
    del out
    assert usage.unmoved_bytes() == 0
    del gone
    assert usage.entries() == [stays]
    assert isinstance(stays, GraphUsage)


def test_what_died_leaves_no_binding_behind() -> None:
    usage = DeviceUsage()
    entry = usage.open()
    keeps = parameter()
    for _ in range(50):
        entry.bind([keeps, parameter()])
    assert entry.bindings == 0
    entry.bind([keeps])
    assert entry.bindings == 1 and entry.parameters == {id(keeps)}


class Optimizer:
    def held_bytes(self) -> int:
        return 1000


def test_what_optimizers_hold_counts_once_for_all_parameters_of_theirs() -> None:
    usage = DeviceUsage()
    entry = usage.open()
    a, b = parameter(), parameter()
    binding = entry.bind([a, b])
    assert usage.held_beside(entry, binding).now == 0
    mine = Optimizer()
    count([a, b], mine)
    usage.invalidate()
    assert usage.held_beside(entry, binding).now == 1000
    del mine
    usage.invalidate()
    assert usage.held_beside(entry, binding).now == 0


def test_only_what_runs_between_two_runs_makes_a_graph_one_of_several() -> None:
    usage = DeviceUsage()
    alone, other = usage.open(), usage.open()
    a, b = parameter(), parameter()
    mine, theirs = alone.bind([a]), other.bind([b])
    usage.begins(other, theirs)
    for _ in range(3):  # what ran before it does not run in turn with it
        usage.begins(alone, mine)
    assert not alone.in_turn
    usage.begins(other, theirs)
    usage.begins(alone, mine)
    assert alone.in_turn and other.in_turn


# --- models -------------------------------------------------------------------------------------


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_blocks_with_options_of_their_own_share_one_budget(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks, plain = nn.Sequential(*(Tower() for _ in range(6))), torch.randn(512, 64)
    wanted = step(blocks, plain)
    budget = 3200 << 10  # all that is kept for backward takes 3 MiB
    before = len(offcompile.reports())
    for block in blocks:
        compiled(block, budget, tmp_path)
    for _ in range(3):
        for mine, theirs in zip(step(blocks, plain), wanted, strict=True):
            assert torch.equal(mine, theirs)
    counted = offcompile.counters()
    assert counted["bytes_out"] > 0
    assert counted["keeper_hits"] > 0 and counted["keeper_bytes"] == 0
    assert 0 < counted["keeper_table_bytes"] <= LearnedLimits().most_bytes
    asked = sum(int(counted[f"keeper_{name}"]) for name in ("hits", "late", "misses"))
    shared = next(r for r in offcompile.reports()[before:] if not r.fits)
    assert f"of {asked} tensors asked for" in str(shared)
    assert shared.memory.beside_bytes > 0 and "that others hold" in str(shared)
    (keeper,) = [k for r in runtimes() if (k := r.mover.keeper) is not None]
    assert keeper.held_bytes == 0 and keeper.limit_bytes <= budget


def test_a_model_deleted_gives_its_room_back(tmp_path: Path) -> None:
    before, x = held_now(), torch.randn(64, 64)
    first, second = compiled(Tower(), "1GiB", tmp_path), compiled(Tower(6), "1GiB", tmp_path)
    step(first, x)
    step(second, x)
    both = held_now()
    assert both - before == 2 * (bytes_of(first) + bytes_of(second))  # and their gradients
    room = 2 * bytes_of(second)
    del second
    assert both - held_now() == room
    step(first, x)
    del first
    assert held_now() == before


def test_a_teacher_that_does_not_train_holds_its_weights_alone(tmp_path: Path) -> None:
    before, count = held_now(), len(offcompile.reports())
    teacher, student = compiled(Tower(), "8MiB", tmp_path), compiled(Tower(2), "8MiB", tmp_path)
    teacher.requires_grad_(False)
    x = torch.randn(256, 64)
    for _ in range(2):
        student.zero_grad()
        with torch.no_grad():
            aim = teacher(x)
        (student(x) - aim).square().mean().backward()
    whole, rest = [report.budget_bytes for report in offcompile.reports()[count:]]
    assert whole - rest == bytes_of(teacher)
    assert held_now() - before == bytes_of(teacher) + 2 * bytes_of(student)


def test_two_models_in_turn_with_a_runtime_each_keep_to_the_budget(tmp_path: Path) -> None:
    torch.manual_seed(2)
    one, other, x = Tower(8), Tower(8), torch.randn(512, 64)
    wanted = step(other, x)
    places = tmp_path / "a", tmp_path / "b"
    for place in places:
        place.mkdir()
    compiled(one, 2600 << 10, places[0])
    compiled(other, 2600 << 10, places[1])
    for _ in range(3):
        waiting = one(x)  # its backward comes later
        for mine, theirs in zip(step(other, x), wanted, strict=True):
            assert torch.equal(mine, theirs)
        kept = [k for r in runtimes() if (k := r.mover.keeper) is not None]
        assert sum(k.held_bytes for k in kept) <= 2600 << 10
        waiting.square().mean().backward()
        del waiting
    assert all(k.held_bytes == 0 for k in kept)
