"""The cache obeys the plan of a whole step while its order holds, and decides itself when not:
right numbers, no races, never over the limit, whatever comes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from lengths import some
from simulated import SimulatedDevice
from simulated_blocks import read_back, save

from offcompile.ir import DEVICE, HOST, Lane, Machine, Tier
from offcompile.passes.correlation.predictor import Predictor
from offcompile.passes.step.record import RecordedStep
from offcompile.passes.step.stitch import stitch
from offcompile.passes.step.table import StepTable, table_of
from offcompile.planning.planner import plan_problem
from offcompile.runtime.moves.activation_cache import ActivationCache
from offcompile.runtime.moves.mover import Mover

NBYTES = 64
LAYERS, PER_LAYER = 5, 2
OWN = PER_LAYER * NBYTES


def machine(nbytes: int) -> Machine:
    lanes = (Lane("out", DEVICE, HOST, 1000.0), Lane("in", HOST, DEVICE, 1000.0))
    return Machine((Tier(DEVICE, nbytes), Tier(HOST)), lanes)


def planned(step: RecordedStep) -> StepTable:
    stitched = stitch(step)
    found = plan_problem(stitched.problem, machine(stitched.capacity_bytes), seconds=0.1)
    return table_of(stitched, found.plan)


class Blocks:
    """Blocks that are graphs of their own, under plans that include what the block itself saves."""

    def __init__(self, seed: int, limit: int) -> None:
        self.device = SimulatedDevice(seed, longest_pause_s=0.0001)
        self.mover = Mover(self.device)
        self.keeper = self.mover.keeper = ActivationCache(self.mover, Predictor(), planned)
        self.limit = limit
        self.saved: dict[int, tuple[int, list[torch.Tensor]]] = {}
        self.seen: list[int] = []
        #: most bytes beside the running block and its own tensors
        self.most = 0
        #: executions that a table governed
        self.followed = 0

    def _enter(self, phase: str, layer: int, own: int) -> None:
        backward = phase == "B"
        self.keeper.enter((phase, layer), self.limit + own, backward=backward, own_bytes=own)
        self.most = max(self.most, self.keeper.held_bytes - own)
        self.followed += self.keeper.steps.table is not None

    def forward(self, at: int, layer: int, step: int) -> None:
        self._enter("F", layer, 0)
        before = self.keeper.held_bytes
        mine: list[torch.Tensor] = []
        self.saved[at] = layer, mine
        for k in range(PER_LAYER):
            value, kernel = (50 * step + 10 * at + k) % 256, f"F{layer}.{k}"
            mine.append(save(self.mover, self.device, NBYTES, value, f"a{k}", kernel))
        assert self.keeper.held_bytes <= max(before, self.limit) + OWN
        self.keeper.leave()

    def backward(self, at: int) -> None:
        layer, mine = self.saved.pop(at)
        own = self.keeper.bytes_of(("F", layer))
        self._enter("B", layer, own)
        read_back(self.mover, self.device, mine, self.seen, f"B{layer}")
        self.keeper.leave()

    def step(self, number: int, layers: Sequence[int] = range(LAYERS)) -> list[int]:
        self.seen.clear()
        for at, layer in enumerate(layers):
            self.forward(at, layer, number)
        for at in reversed(range(len(layers))):
            self.backward(at)
        self.device.drain()
        self.mover.sweep()
        return list(self.seen)

    def close(self) -> None:
        self.mover.close()
        assert self.device.races == []
        assert self.keeper.held_bytes == 0
        assert not self.mover._tickets


def expected(step: int, blocks: int = LAYERS) -> list[int]:
    turned = reversed(range(blocks))
    return [(50 * step + 10 * at + k) % 256 for at in turned for k in reversed(range(PER_LAYER))]


@pytest.mark.parametrize("seed", some(range(12), *range(4)))
@pytest.mark.parametrize("room", [0, 2, 3, 5, 10])
def test_right_numbers_and_no_race_whatever_room_there_is(seed: int, room: int) -> None:
    run = Blocks(seed, room * NBYTES)
    for step in range(5):
        assert run.step(step) == expected(step)
    assert run.followed == 3 * 2 * LAYERS
    assert run.keeper.steps.lost == 0
    assert run.most <= room * NBYTES
    run.close()


@pytest.mark.parametrize("room", [2, 3, 5])
def test_what_leaves_is_back_before_it_is_wanted(room: int) -> None:
    """With room for the tensors of one more block beside each, nothing is missed."""
    run = Blocks(0, room * NBYTES)
    for step in range(3):
        run.step(step)
    counted = run.keeper.foresight.counters
    before, moved = counted.misses, run.mover.tally.bytes_out
    run.step(3)
    table = run.keeper.steps._known[next(iter(run.keeper.steps._known))].table
    assert table is not None
    assert counted.misses == before
    assert run.mover.tally.bytes_out - moved == table.moved_bytes > 0
    run.close()


def test_with_room_for_all_nothing_leaves() -> None:
    run = Blocks(0, LAYERS * OWN)
    for step in range(4):
        assert run.step(step) == expected(step)
    assert run.followed
    assert run.mover.tally.bytes_out == 0
    run.close()


ORDERS = {
    "two in turn": [[0, 1, 2, 3, 4], [0, 2, 1, 3, 4]] * 4,
    "another after a while": [[0, 1, 2, 3, 4]] * 4 + [[0, 1, 4, 2, 3]] * 3,
    "shorter and longer": [[0, 1, 2, 3, 4]] * 3 + [[0, 1, 2], [0, 1, 2, 3, 4, 0, 1]] * 3,
    "never the same": [[k % 5, (k * k) % 5, (3 * k + 1) % 5] for k in range(8)],
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("orders", ORDERS)
def test_right_numbers_when_the_order_changes(seed: int, orders: str) -> None:
    run = Blocks(seed, 3 * NBYTES)
    for step, order in enumerate(ORDERS[orders]):
        assert run.step(step, order) == expected(step, len(order))
    assert run.most <= 3 * NBYTES
    assert (run.followed > 0) == (orders != "never the same")
    run.close()


def test_two_orders_in_turn_miss_nothing_once_they_are_known() -> None:
    run = Blocks(0, 3 * NBYTES)
    for step, order in enumerate(ORDERS["two in turn"][:6]):
        run.step(step, order)
    before = run.keeper.foresight.counters.misses
    for step, order in enumerate(ORDERS["two in turn"][:2]):
        assert run.step(step, order) == expected(step)
    assert run.keeper.foresight.counters.misses == before
    assert run.keeper.steps.lost == 0
    run.close()


@pytest.mark.parametrize("seed", range(6))
def test_less_room_than_planned_takes_tensors_out_and_no_more(seed: int) -> None:
    run = Blocks(seed, 6 * NBYTES)
    for step in range(3):
        run.step(step)
    run.limit, run.most = 2 * NBYTES, 0
    for step in range(3, 7):
        assert run.step(step) == expected(step)
    assert run.most <= 2 * NBYTES
    run.close()
