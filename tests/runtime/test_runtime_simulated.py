"""The mover on the simulated device: no races as it is, races with any order taken away."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from simulated import SimulatedDevice

from offcompile.runtime.device import tickets
from offcompile.runtime.device.interface import Copy, Label, Point
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

NBYTES = 64
SEEDS = range(40)


class NoWaitOut(Mover):
    def _wait(self, copy: Copy, load: bool) -> None:
        if load:
            super()._wait(copy, load)


class NoWaitLoad(Mover):
    def _wait(self, copy: Copy, load: bool) -> None:
        if not load:
            super()._wait(copy, load)


class NoMark(Mover):
    """Copies do not wait for compute to have got where they were asked for."""

    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(None, out)


class NoMarkForLoads(Mover):
    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(mark if out is None else None, out)


class LoadsDoNotWaitForTheCopyOut(Mover):
    """The fault shows because nothing but the copy itself lies between wait and load."""

    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(None if out is not None else mark, None)


def fill(value: int) -> object:
    def kernel(*arrays: np.ndarray) -> None:
        arrays[-1][:] = value

    return kernel


def train(
    mover: Mover, device: SimulatedDevice, lanes: tuple[str, str], layers: int = 6
) -> list[int]:
    """A forward that saves each layer's output and a backward that reads them, reversed."""
    seen: list[int] = []
    saved: list[torch.Tensor] = []
    x = device.empty(NBYTES)
    for layer in range(layers):
        # the same memory is written again as soon as the copy out of it has been waited for
        device.compute(fill(layer + 1), (), (x,), f"F{layer}")
        saved.append(mover.start_out(x, f"a{layer}", "host", lanes[0]))
        y = device.empty(NBYTES)
        device.compute(lambda x, y: y.__setitem__(slice(None), x), (x,), (y,), f"G{layer}")
        mover.wait_out(tickets.find(saved[-1], Saved))
        if layer % 2:
            x = y
    del x, y
    loads: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
    for layer in reversed(range(layers)):
        while saved and len(loads) < 3:
            left = tickets.find(saved[-1], Saved)
            loads.append(mover.start_load(left, left.tag, lanes[1]))
            saved.pop()
        buffer, ticket = loads.popleft()
        mover.wait_load(tickets.find(ticket, Load))
        device.compute(lambda b: seen.append(int(b[0])), (buffer,), (), f"B{layer}")
        # its memory goes round at once, while the kernel may still be queued
        del buffer, ticket
    device.drain()
    return seen


def run(
    kind: type[Mover], seed: int, lanes: tuple[str, str] = ("out", "in")
) -> tuple[list[int], list[str], SimulatedDevice]:
    device = SimulatedDevice(seed, longest_pause_s=0.0001)
    mover = kind(device)
    seen = train(mover, device, lanes)
    mover.close()
    return seen, sorted({race.kind for race in device.races}), device


@pytest.mark.parametrize("lanes", [("out", "in"), ("one", "one")], ids=["two lanes", "one lane"])
def test_the_mover_has_no_races_whatever_the_timing(lanes: tuple[str, str]) -> None:
    for seed in SEEDS:
        seen, kinds, device = run(Mover, seed, lanes)
        assert device.races == [], seed
        assert seen == [6, 5, 4, 3, 2, 1], seed
        assert kinds == []


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (NoWaitOut, "read then write"),
        (NoWaitLoad, "write then read"),
        (NoMark, "write then read"),
        (NoMarkForLoads, "read then write"),
        (LoadsDoNotWaitForTheCopyOut, "write then read"),
    ],
)
def test_an_order_taken_away_is_found_every_time(kind: type[Mover], expected: str) -> None:
    for seed in SEEDS:
        _, kinds, _ = run(kind, seed)
        assert expected in kinds, seed


def test_a_race_names_both_accesses() -> None:
    _, _, device = run(NoWaitLoad, 0)
    assert ("load a5", "compute B5") in {(race.first, race.second) for race in device.races}


def test_a_load_nobody_waits_for_leaves_nothing_behind() -> None:
    device = SimulatedDevice(0)
    mover = Mover(device)
    x = device.empty(NBYTES)
    device.compute(fill(7), (), (x,))
    ticket = mover.start_out(x, "a", "host", "out")
    buffer, load = mover.start_load(tickets.find(ticket, Saved), "a", "in")
    del x, ticket, buffer, load
    mover.sweep()
    device.drain()
    mover.sweep()
    again = device.empty(NBYTES)
    device.compute(fill(9), (), (again,))
    device.drain()
    assert device.races == []
    assert mover._gauges() == {"live_tickets": 0, "in_flight_bytes": 0}
    mover.close()


def held_up(device: SimulatedDevice) -> tuple[threading.Event, Copy]:
    """A copy out that does not end before the event is set; those behind it are queued."""
    go = threading.Event()
    x = device.empty(NBYTES)
    device.compute(lambda _: go.wait(), (), (x,), "slow")
    mark = device.mark()
    assert mark is not None
    slot = device.slot(x, "host")
    return go, device.copy_out("out", x, slot, [mark], Label("out", "first"), lambda _: None)


def test_a_cancelled_copy_is_in_nobodys_way() -> None:
    device = SimulatedDevice(0)
    go, _ = held_up(device)
    x = device.empty(NBYTES)
    slot = device.slot(x, "host")
    for _ in range(2):
        copy = device.copy_out("out", x, slot, [], Label("out", "a"), lambda _: None)
        assert device.cancel(copy)
    device.copy_out("out", x, slot, [], Label("out", "a"), lambda _: None)
    go.set()
    device.drain()
    assert device.races == []
    device.close()


def test_the_copy_before_a_cancelled_one_still_counts() -> None:
    device = SimulatedDevice(0)
    go, _ = held_up(device)
    x = device.empty(NBYTES)
    slot = device.slot(x, "host")
    device.copy_out("out", x, slot, [], Label("out", "a"), lambda _: None)
    assert device.cancel(device.copy_out("out", x, slot, [], Label("out", "b"), lambda _: None))
    before = list(device.races)
    device.copy_out("other", x, slot, [], Label("out", "c"), lambda _: None)
    assert [(race.first, race.second) for race in device.races[len(before) :]] == [
        ("out a", "out c")
    ]
    go.set()
    device.drain()
    device.close()


def test_memory_of_a_copy_that_has_ended_goes_round_whoever_lets_go_last() -> None:
    device = SimulatedDevice(0)
    x = device.empty(NBYTES)
    slot = device.slot(x, "host")
    copy = device.copy_in("in", slot, x, [], Label("load", "a"), lambda _: None)
    device.drain()
    assert copy.ended
    del x, copy
    device.copy_in("other", slot, device.empty(NBYTES), [], Label("load", "b"), lambda _: None)
    device.drain()
    assert device.races == []
    device.close()
