"""Weights and gradients in host memory, on simulated streams: every order that is needed is there.

The optimizer updates weights where they lie, loads of them come behind it, gradients are stored to
memory that goes round: no races whatever the timing, and races with any order taken away.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_bench import NOTHING, STAGING, Bench, Disk, bench_of, fill
from lengths import some
from simulated import SimulatedDevice

from offcompile.ir import OffloadError
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.cuda.host_aliases import HostAliases, ShadowSlot
from offcompile.runtime.device.interface import Copy, Point
from offcompile.runtime.device.streams import Event, Stream
from offcompile.runtime.memory.host_arena import HostArena, HostFull
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Saved

SIZES = (64, 200, 64)


def shadow(bench: Bench, nbytes: int, value: int) -> torch.Tensor:
    (tensor,) = bench.device.addressable([nbytes])
    bench.streams.launch(fill(value), (), (tensor,), f"place {value}")
    return tensor


def fetch(bench: Bench, host: torch.Tensor, tag: str = "w") -> tuple[torch.Tensor, torch.Tensor]:
    return bench.mover.start_fetch(host, tag, "h2d")


def store(bench: Bench, x: torch.Tensor, tag: str = "g") -> torch.Tensor:
    return bench.mover.start_store(x, tag, "d2h")


def host_of(ticket: torch.Tensor) -> torch.Tensor:
    host = tickets.find(ticket, Saved).host
    assert host is not None
    return host


def add(gradient: np.ndarray, weight: np.ndarray) -> None:
    weight += gradient


def learn(bench: Bench, seed: int, steps: int = 3) -> None:
    """Steps of training: fetched or used in place, gradients stored, updated on compute."""
    dice = random.Random(seed)
    weights = bench.device.addressable(SIZES)
    values = [10 * n for n in range(len(SIZES))]
    for weight, value in zip(weights, values, strict=True):
        bench.streams.launch(fill(value), (), (weight,), f"place {value}")
    late: list[tuple[torch.Tensor, int]] = []
    for step in range(steps):
        for n, weight in enumerate(weights):
            if dice.random() < 0.3:
                bench.expect(weight, values[n], f"in place {n}")
                continue
            buffer, load = fetch(bench, weight, f"w{n}")
            if dice.random() < 0.3:
                continue  # an exception came in between
            bench.wait_load(load)
            bench.expect(buffer, values[n], f"step {step} w{n}")
            del buffer, load
        gradients: list[torch.Tensor] = []
        for n, weight in enumerate(weights):
            gradient = bench.full(weight.numel(), n + 1)
            ticket = store(bench, gradient, f"g{n}")
            if dice.random() < 0.5:
                bench.full(64, 99)
            bench.wait_out(ticket)
            gradients.append(host_of(ticket))
            del gradient, ticket
        if dice.random() < 0.3:
            (extra,) = bench.device.addressable([dice.choice(SIZES)])
            bench.streams.launch(fill(7), (), (extra,), "extra")
            late.append((extra, 7))
            del extra
        for n, weight in enumerate(weights):
            # something that nobody waited for still reads it: compute must not write before
            bench.streams.wait(bench.streams.compute(), _end_of_lane(bench))
            bench.streams.launch(add, (gradients[n],), (weight,), f"update {n}")
            values[n] += n + 1
        gradients.clear()
        if late and dice.random() < 0.5:
            tensor, value = late.pop()
            bench.expect(tensor, value)
            del tensor
    for tensor, value in late:
        bench.expect(tensor, value)
    # the graphs' own variables
    del weights, late, weight
    gc.collect(0)


def _end_of_lane(bench: Bench) -> Event:
    return bench.streams.record(bench.streams.stream("h2d"))


def update_then_fetch(bench: Bench) -> None:
    weight = shadow(bench, 64, 1)
    with bench.unseen():
        bench.streams.launch(fill(2), (), (weight,), "update")
        buffer, load = fetch(bench, weight)
        bench.wait_load(load)
        bench.expect(buffer, 2)


def store_then_use(bench: Bench) -> None:
    with bench.unseen():
        ticket = store(bench, bench.full(64, 3))
        bench.wait_out(ticket)
        gradient = host_of(ticket)
        bench.expect(gradient, 3)
        bench.streams.launch(fill(4), (), (gradient,), "zero_grad")


def drop_while_fetched(bench: Bench) -> None:
    """The next of its size gets memory that a load nobody waited for still reads."""
    kept = shadow(bench, 64, 9)  # as much as is kept for reuse
    with bench.unseen():
        weight = shadow(bench, 64, 1)
        fetch(bench, weight)
        slot = bench.device.slot_of(weight)
        # the mover's own reference is taken away: orders between streams alone must do
        for copy in tuple(bench.device._in_flight.unfinished):
            copy.on_end = None
        bench.mover.sweep()
        del weight
        again = shadow(bench, 64, 2)
        assert bench.device.slot_of(again) is slot
    bench.expect(kept, 9)


def drop_on_another_stream(bench: Bench) -> None:
    """A kernel still uses memory that another stream's next tensor gets."""
    kept, weight = shadow(bench, 64, 9), shadow(bench, 64, 1)
    slot = bench.device.slot_of(weight)
    del weight
    with bench.streams.on(bench.streams.stream("another")):
        again = shadow(bench, 64, 2)
    assert bench.device.slot_of(again) is slot
    bench.expect(kept, 9)


def drop_for_the_host(bench: Bench) -> None:
    """The arena's memory may be the host's own next, as staging for disks is."""
    weight = shadow(bench, 64, 1)
    del weight
    bench.device.shadows.release()
    block = bench.device.arena.block(256)
    bench.streams.touch(block.tensor, True, "the host")
    block.free()


PROGRAMS = (
    update_then_fetch,
    store_then_use,
    drop_while_fetched,
    drop_on_another_stream,
    drop_for_the_host,
)


# -- as it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", some(range(16), 0))
def test_no_race_whatever_the_timing(part: int) -> None:
    for seed in range(part, 2000, 16):
        bench = bench_of(seed, in_flight_bytes=None if seed % 3 else 600)
        learn(bench, seed)
        bench.settle()
        bench.device.shadows.release()
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


def test_no_race_with_a_thread_for_each_stream() -> None:
    for seed in range(30):
        bench = bench_of(seed, pace_s=0.0002)
        learn(bench, seed, steps=2)
        bench.settle()
        bench.device.shadows.release()
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_for_planted_faults_are_clean(program: Callable[[Bench], None]) -> None:
    for seed in range(40):
        bench = bench_of(seed)
        program(bench)
        bench.settle()
        bench.device.shadows.release()
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


# -- with one order taken away -------------------------------------------------------------------


class FetchesDoNotWaitForCompute(Mover):
    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(None, out)


class NoWaitOut(Mover):
    def _wait(self, copy: Copy, load: bool) -> None:
        if load:
            super()._wait(copy, load)


class ReusedAtOnce(HostAliases):
    def _follow(self, home: Stream, slot: ShadowSlot) -> None:
        return None


class GivenBackAtOnce(HostAliases):
    def _see_end(self, event: Event) -> None:
        return None


@pytest.mark.parametrize(
    ("fault", "program", "expected"),
    [
        (FetchesDoNotWaitForCompute, update_then_fetch, "write then read"),
        (NoWaitOut, store_then_use, "write then read"),
        (ReusedAtOnce, drop_while_fetched, "read then write"),
        (ReusedAtOnce, drop_on_another_stream, "write then write"),
        (GivenBackAtOnce, drop_for_the_host, "write then write"),
    ],
)
def test_an_order_taken_away_is_found_every_time(
    fault: type, program: Callable[[Bench], None], expected: str
) -> None:
    mover = fault if issubclass(fault, Mover) else Mover
    for seed in range(40):
        bench = bench_of(seed, mover=mover)
        if issubclass(fault, HostAliases):
            bench.device.shadows.__class__ = fault  # the device's slots have the same object
        program(bench)
        bench.device.drain()
        bench.close()
        assert expected in {race.kind for race in bench.streams.races}, seed


# -- memory --------------------------------------------------------------------------------------


def test_new_ones_lie_one_behind_the_other() -> None:
    bench = bench_of(0)
    first, empty, last = bench.device.addressable([300, 0, 64])
    assert [t.numel() for t in (first, empty, last)] == [300, 0, 64]
    assert last.data_ptr() - first.data_ptr() == 512 + 256
    slots = [bench.device.slot_of(t) for t in (first[5:], last.view(torch.float32)[1:])]
    assert [slot and slot.nbytes for slot in slots] == [300, 64]
    assert bench.device.slot_of(torch.ones(3)) is None
    assert bench.device.slot_of(bench.full(64, 1)) is None
    bench.close()


def test_room_goes_round_while_as_much_lives() -> None:
    bench = bench_of(0)
    shadows = bench.device.shadows
    weight, gradient = shadow(bench, 200, 1), shadow(bench, 64, 2)
    address = gradient.data_ptr()
    view = gradient.view(torch.float32)
    del gradient
    assert shadow(bench, 64, 3).data_ptr() != address
    del view
    again = shadow(bench, 64, 4)
    assert again.data_ptr() in (address, address + 256)
    bench.settle()
    del weight, again
    assert bench.device.slot_of(torch.ones(1)) is None
    assert (shadows.used_bytes, shadows.spare_bytes) == (0, 0)
    assert bench.left() == NOTHING
    bench.close()


def test_a_full_arena_takes_back_what_is_spare(tmp_path: Path) -> None:
    bench = bench_of(0, limit_bytes=1024)
    kept, spare = shadow(bench, 512, 1), shadow(bench, 512, 2)
    del spare
    assert bench.device.shadows.spare_bytes == 0  # not swept yet
    other = shadow(bench, 500, 3)
    assert bench.device.shadows.used_bytes == 1012
    with pytest.raises(HostFull, match="256 bytes do not fit: 1024 of 1024 are used"):
        bench.device.addressable([1])
    del other
    # an activation may have it too
    bench.device.slot_of(kept)
    ticket = bench.out(bench.full(512, 5))
    bench.wait_out(ticket)
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    bench.expect(buffer, 5)
    bench.expect(kept, 1)
    bench.settle()
    assert (bench.streams.races, bench.wrong) == ([], [])
    bench.close()


def test_a_fetch_outlives_its_weight() -> None:
    for seed in range(40):
        bench = bench_of(seed)
        buffer, load = fetch(bench, shadow(bench, 64, 5))
        other = shadow(bench, 64, 6)
        bench.wait_load(load)
        bench.expect(buffer, 5)
        bench.expect(other, 6)
        bench.settle()
        bench.close()
        assert (bench.streams.races, bench.wrong) == ([], []), seed


class Registrar:
    def register(self, address: int, nbytes: int) -> int:
        return 0

    def unregister(self, address: int) -> int:
        return 0


def test_on_the_real_arena_every_byte_comes_back(tmp_path: Path) -> None:
    bench = bench_of(0)
    arena = HostArena(1 << 20, registrar=Registrar())
    device = CudaDevice(bench.streams, arena, {}, STAGING)
    mine = Bench(bench.streams, device, Mover(device))
    learn(mine, 0)
    mine.settle()
    device.shadows.release()
    assert mine.wrong == []
    assert device.shadows.used_bytes == device.shadows.spare_bytes == 0
    mine.close()
    bench.close()
    # the simulation keeps what it did not make
    del bench, mine, device
    gc.collect()
    assert arena.used_bytes == 0 and arena.peak_bytes > 0
    arena.close()


def test_memory_that_cannot_be_aliased_is_named() -> None:
    bench = bench_of(0)

    def refuse(host: torch.Tensor) -> torch.Tensor:
        raise OffloadError("not in a pinned arena")

    bench.streams.alias = refuse  # type: ignore[method-assign]
    with pytest.raises(OffloadError, match="not in a pinned arena"):
        bench.device.addressable([64, 64])
    gc.collect()
    assert bench.device.shadows.used_bytes == 0
    bench.close()


def test_a_disk_s_staging_is_not_in_the_way(tmp_path: Path) -> None:
    with Disk([tmp_path], reserve_bytes=0) as disk:
        bench = bench_of(0, {"disk": disk}, limit_bytes=2 * STAGING + 4096)
        learn(bench, 1)
        bench.settle()
        bench.device.shadows.release()
        assert (bench.wrong, bench.left()) == ([], NOTHING)
        bench.close()


# -- the other simulation: threads, and clocks of what the program asked for ----------------------


def train_by_threads(kind: type[Mover], seed: int) -> tuple[list[str], list[str]]:
    device = SimulatedDevice(seed, longest_pause_s=0.0001)
    mover, wrong = kind(device), list[str]()
    weight, other = device.addressable([64, 64])
    value = 1

    def expect(found: np.ndarray, wanted: int) -> None:
        if not (found == wanted).all():
            wrong.append(f"{found[0]}, not {wanted}")

    device.compute(fill(value), (), (weight,), "place")
    device.compute(fill(0), (), (other,), "place")
    for _ in range(3):
        buffer, load = mover.start_fetch(weight, "w", "in")
        mover.wait_load(tickets.find(load, _load()))
        device.compute(lambda b, v=value: expect(b, v), (buffer,), (), "forward")
        gradient = device.empty(64)
        device.compute(fill(2), (), (gradient,), "backward")
        ticket = mover.start_store(gradient, "g", "out")
        mover.wait_out(tickets.find(ticket, Saved))
        host = host_of(ticket)
        device.compute(add, (host,), (weight,), "update")
        value += 2
        del buffer, load, gradient, ticket, host
    device.drain()
    kinds = sorted({race.kind for race in device.races})
    mover.close()
    return kinds, wrong


def _load() -> type:
    from offcompile.runtime.moves.saved import Load

    return Load


def test_by_threads_it_is_clean_and_planted_faults_are_found() -> None:
    for seed in range(20):
        assert train_by_threads(Mover, seed) == ([], []), seed
        kinds, _ = train_by_threads(FetchesDoNotWaitForCompute, seed)
        assert "write then read" in kinds, seed
        kinds, _ = train_by_threads(NoWaitOut, seed)
        assert "write then read" in kinds, seed
