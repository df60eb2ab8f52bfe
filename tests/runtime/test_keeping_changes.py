"""A copy of a weight on the host is never stale: each way of changing weights, one by one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from offcompile.passes.correlation.predictor import Predictor
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.device.mapped import MappedStore
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.moves.activation_cache import ActivationCache
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load


class Bench:
    def __init__(self, folder: Path) -> None:
        device = CpuDevice(Arena(1 << 20), {}, mapped=MappedStore(folder))
        self.mover = Mover(device)
        self.keeper = self.mover.keeper = ActivationCache(self.mover, Predictor())

    def parameter(self, value: float, numel: int = 1024) -> torch.nn.Parameter:
        (host,) = self.mover.device.addressable([4 * numel])
        host.view(torch.float32).fill_(value)
        return torch.nn.Parameter(host.view(torch.float32))

    def enter(self, name: str, *weights: torch.nn.Parameter, limit: int = 1 << 20) -> None:
        self.keeper.enter(name, limit, True, weights, name.startswith("B"))

    def fetch(self, weight: torch.Tensor) -> float:
        buffer, ticket = self.mover.start_fetch(weight, "w", "in")
        self.mover.wait_load(tickets.find(ticket, Load))
        return float(buffer.view(torch.float32)[-1])

    def run(self, name: str, *weights: torch.nn.Parameter, limit: int = 1 << 20) -> list[float]:
        self.enter(name, *weights, limit=limit)
        found = [self.fetch(w) for w in weights]
        self.keeper.leave()
        return found

    def loads(self) -> int:
        self.mover.device.drain()
        return self.mover.tally.bytes_in


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.mover.close()


def _in_place(p: torch.nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(2)


def _through_data(p: torch.nn.Parameter) -> None:
    p.data.mul_(2)


def _through_numpy(p: torch.nn.Parameter) -> None:
    p.detach().numpy()[:] *= 2


def _state_dict(p: torch.nn.Parameter) -> None:
    owner = torch.nn.Module()
    owner.register_parameter("p", p)
    owner.load_state_dict({"p": p.detach() * 2})


def _optimizer(p: torch.nn.Parameter) -> None:
    p.grad = -p.detach()
    torch.optim.SGD([p], lr=1.0).step()


COUNTED = [_in_place, _state_dict, _optimizer]
CHANGES = [*COUNTED, _through_data, _through_numpy]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_steps_is_seen(bench: Bench, change: Callable[..., None]) -> None:
    p, q = bench.parameter(1), bench.parameter(1)
    for step in range(3):
        value = float(2**step)
        assert bench.run("F p", p) == bench.run("F q", q) == [value]
        assert bench.run("B q", q) == bench.run("B p", p) == [value]
        change(p)
        change(q)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_evaluations_is_seen(bench: Bench, change: Callable[..., None]) -> None:
    p, q = bench.parameter(1), bench.parameter(1)
    for step in range(4):
        assert bench.run("E p", p) == bench.run("E q", q) == [float(2**step)]
        change(p)
        change(q)


@pytest.mark.parametrize("change", CHANGES)
def test_from_evaluation_to_training_and_back(bench: Bench, change: Callable[..., None]) -> None:
    p, q = bench.parameter(1), bench.parameter(1)
    value = 1.0
    for _ in range(3):
        assert bench.run("E p", p) == bench.run("E q", q) == [value]
        change(p)
        change(q)
        value *= 2
        assert bench.run("F p", p) == bench.run("F q", q) == [value]
        assert bench.run("B q", q) == bench.run("B p", p) == [value]
        change(p)
        change(q)
        value *= 2


@pytest.mark.parametrize("change", COUNTED)
def test_what_autograd_counts_is_seen_at_any_time(
    bench: Bench, change: Callable[..., None]
) -> None:
    p = bench.parameter(1)
    bench.enter("F", p)
    assert bench.fetch(p) == 1
    change(p)
    assert bench.fetch(p) == 2
    bench.keeper.leave()
    change(p)
    assert bench.run("B", p) == [4]


def test_a_copy_serves_the_same_weight_by_any_name(bench: Bench) -> None:
    p = bench.parameter(3)
    bench.enter("F", p)
    assert bench.fetch(p) == bench.fetch(p.detach()) == 3
    bench.keeper.leave()
    assert bench.loads() == 4096
    assert bench.keeper.held_bytes == 4096


def test_other_memory_is_another_weight(bench: Bench) -> None:
    p, q = bench.parameter(1), bench.parameter(2)
    bench.enter("F", p, q)
    assert bench.fetch(p) == 1
    p.data = bench.parameter(5).data
    assert bench.fetch(p) == 5
    bench.keeper.leave()
    p.data, q.data = q.data, p.data
    bench.enter("G", p, q)
    assert (bench.fetch(p), bench.fetch(q)) == (2, 5)
    bench.keeper.leave()


def test_memory_that_went_round_is_not_taken_for_what_it_was(bench: Bench) -> None:
    p = bench.parameter(1)
    bench.run("F", p)
    p.data = torch.ones(1)
    gc.collect()
    p.data = bench.parameter(7).data  # the room of the first, were it free
    assert bench.run("B", p) == [7]


def test_a_parameter_that_dies_gives_its_copy_back(bench: Bench) -> None:
    p = bench.parameter(1)
    bench.run("F", p)
    assert bench.keeper.held_bytes == 4096
    del p
    gc.collect()
    bench.mover.sweep()
    assert bench.keeper.held_bytes == 0
    assert bench.run("F", bench.parameter(2)) == [2]


def test_what_is_held_is_claimed_and_not_fetched_ahead(bench: Bench) -> None:
    p, q = bench.parameter(1), bench.parameter(1)
    for _ in range(3):
        bench.run("F p", p), bench.run("F q", q), bench.run("B q", q), bench.run("B p", p)
    updated: list[str] = []

    def update() -> None:
        updated.append("q")
        q.data.mul_(2)

    bench.mover.device.hold(q, update)
    bench.run("F p", p)
    assert updated == []
    assert bench.run("F q", q) == [2]
    assert updated == ["q"]


def test_a_graph_that_does_not_lend_has_nothing_kept(bench: Bench) -> None:
    p = bench.parameter(1)
    bench.keeper.enter("F", 1 << 20, False, [p])
    assert bench.fetch(p) == 1
    bench.keeper.leave()
    assert bench.keeper.held_bytes == 0
    assert bench.keeper.foresight.counters.touches == 0


def test_a_graph_that_changes_weights_finds_and_leaves_no_copies(bench: Bench) -> None:
    p = bench.parameter(1)
    bench.run("E", p)
    bench.keeper.enter("step", 1 << 20, True, None)
    assert bench.keeper.held_bytes == 0
    assert bench.fetch(p) == 1
    p.data.mul_(2)
    bench.keeper.leave()
    assert bench.keeper.held_bytes == 0
    assert bench.run("E", p) == [2]


def test_less_room_gives_up_what_is_still_on_its_way(bench: Bench) -> None:
    p, q = bench.parameter(1, 1 << 18), bench.parameter(2, 1 << 18)
    for _ in range(3):
        bench.run("F p", p, limit=1 << 22), bench.run("F q", q, limit=1 << 22)
        bench.run("B q", q, limit=1 << 22), bench.run("B p", p, limit=1 << 22)
    for limit in (1 << 22, 1 << 20, 0):
        bench.enter("F p", p, limit=limit)
        assert bench.keeper.held_bytes <= limit
        assert bench.fetch(p) == 1
        bench.keeper.leave()
        bench.keeper.bound(0)
        assert bench.keeper.held_bytes == 0
