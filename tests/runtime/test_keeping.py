"""Tensors that plans let leave stay while there is room: right numbers, no races, no excess."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from lengths import some
from simulated import SimulatedDevice
from simulated_blocks import read_back, save

from offcompile.ir import OffloadError
from offcompile.passes.correlation.predictor import Predictor
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.moves.activation_cache import ActivationCache
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

NBYTES = 64
LAYERS, PER_LAYER = 5, 2


class Blocks:
    """A stack of blocks that are graphs of their own: all forwards, then all backwards."""

    def __init__(
        self, mover: Mover, device: SimulatedDevice, keeper: ActivationCache, limit: int
    ) -> None:
        self.mover, self.device, self.keeper, self.limit = mover, device, keeper, limit
        #: True if every copy has ended before the next graph begins, at any speed of the lanes
        self.settles = False
        self.saved: dict[int, list[torch.Tensor]] = {}
        self.seen: list[int] = []
        self.most = 0

    def forward(self, layer: int, step: int) -> None:
        self.keeper.enter(("F", layer), self.limit)
        self.most = max(self.most, self.keeper.held_bytes)
        mine = self.saved[layer] = []
        for k in range(PER_LAYER):
            value, kernel = 50 * step + 10 * layer + k, f"F{layer}.{k}"
            mine.append(save(self.mover, self.device, NBYTES, value, f"a{k}", kernel))
        self.keeper.leave()
        self.settle()

    def backward(self, layer: int) -> None:
        self.keeper.enter(("B", layer), self.limit)
        self.most = max(self.most, self.keeper.held_bytes)
        mine = self.saved.pop(layer)
        read_back(self.mover, self.device, mine, self.seen, f"B{layer}")
        self.keeper.leave()
        self.settle()

    def settle(self) -> None:
        if self.settles:
            self.device.drain()
            self.mover.sweep()

    def step(self, number: int) -> list[int]:
        self.seen.clear()
        for layer in range(LAYERS):
            self.forward(layer, number)
        for layer in reversed(range(LAYERS)):
            self.backward(layer)
        self.device.drain()
        self.mover.sweep()
        return list(self.seen)


def expected(step: int) -> list[int]:
    layers, within = reversed(range(LAYERS)), range(PER_LAYER)
    return [50 * step + 10 * layer + k for layer in layers for k in reversed(within)]


def blocks(seed: int, limit: int) -> Blocks:
    device = SimulatedDevice(seed, longest_pause_s=0.0001)
    mover = Mover(device)
    mover.keeper = ActivationCache(mover, Predictor())
    return Blocks(mover, device, mover.keeper, limit)


@pytest.mark.parametrize("seed", some(range(30), *range(10)))
@pytest.mark.parametrize("room", [0, 1, 3, 6, 10])
def test_right_numbers_and_no_race_whatever_room_there_is(seed: int, room: int) -> None:
    run = blocks(seed, room * NBYTES)
    for step in range(2):
        assert run.step(step) == expected(step)
    run.mover.close()
    assert run.device.races == []
    assert run.most <= room * NBYTES
    assert run.keeper.held_bytes == 0
    assert not run.mover._tickets


def moved(room: int, steps: int = 4) -> list[int]:
    """Bytes out, step by step."""
    run = blocks(0, room * NBYTES)
    counts = []
    for step in range(steps):
        before = run.mover.tally.bytes_out
        run.step(step)
        counts.append(run.mover.tally.bytes_out - before)
    run.mover.close()
    return counts


def test_with_room_for_all_nothing_moves_and_with_none_everything() -> None:
    everything = LAYERS * PER_LAYER * NBYTES
    assert moved(2 * LAYERS * PER_LAYER) == [0] * 4
    assert moved(0) == [everything] * 4


def test_the_last_layers_stay_because_they_return_at_once() -> None:
    run = blocks(0, 4 * NBYTES)
    run.settles = True
    run.step(0)
    loads = []
    start_load = run.mover.device.copy_in

    def watched(lane, slot, target, after, label, on_end):  # type: ignore[no-untyped-def]
        loads.append(len(run.seen))
        return start_load(lane, slot, target, after, label, on_end)

    run.mover.device.copy_in = watched  # type: ignore[method-assign]
    run.step(1)
    run.mover.close()
    assert len(loads) == LAYERS * PER_LAYER - 4


class Broken:
    """pwritev that fails while it is told to."""

    def __init__(self) -> None:
        self.fails = False

    def __call__(self, *args: object) -> int:
        if self.fails:
            raise OSError(errno.ENOSPC, "full")
        return os.pwritev(*args)  # type: ignore[arg-type]


def test_a_disk_that_fails_when_room_is_wanted_loses_nothing(tmp_path: Path) -> None:
    writes = Broken()
    store = SpillStore([tmp_path], files=Files(pwritev=writes))
    mover = Mover(CpuDevice(Arena(1 << 20), {"host": store}))
    keeper = mover.keeper = ActivationCache(mover, Predictor())
    x = torch.arange(4096, dtype=torch.float32)
    keeper.enter("F0", 1 << 20)
    ticket = mover.start_out(x, "x", "host", "out")
    mover.wait_out(tickets.find(ticket, Saved))
    wanted = x.clone()
    del x
    keeper.leave()
    writes.fails = True
    with pytest.raises(OffloadError, match="free space there"):
        keeper.enter("F1", 0)
    writes.fails = False
    keeper.enter("F1", 0)
    assert keeper.held_bytes == 0
    buffer, load = mover.start_load(tickets.find(ticket, Saved), "x", "in")
    mover.wait_load(tickets.find(load, Load))
    assert torch.equal(buffer.view(torch.float32), wanted)
    del ticket, load, buffer
    mover.sweep()
    assert store.used_bytes == 0
    mover.close()
    store.close()
