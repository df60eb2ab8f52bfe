"""The CUDA device on simulated streams: what it does, says, holds and gives back."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_bench import (
    NOTHING,
    PAGE,
    STAGING,
    Bench,
    Disk,
    bench_of,
    train,
)
from simulated_streams import Faults, SimulatedStreams

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import counters, record, reset_counters
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.failures import DeviceFull
from offcompile.runtime.device.interface import Copy, Label, Point
from offcompile.runtime.device.streams import flat_bytes, when_storage_dies
from offcompile.runtime.disk.spill import SpillFull
from offcompile.runtime.memory.host_arena import HostArena
from offcompile.runtime.moves.mover import Mover

ROOT = Path(__file__).parents[2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[dict[str, Disk]]:
    with Disk([tmp_path], reserve_bytes=0) as store:
        yield {"disk": store}


# -- faults --------------------------------------------------------------------------------------


def shaken(faults: Faults, seed: int, stores: dict[str, Disk], tier: str) -> list[str]:
    """A program of three tensors, each on its own; returns what was raised."""
    bench = bench_of(seed, stores, faults=faults)
    told: list[str] = []
    for value in (1, 2, 3):
        try:
            ticket = bench.out(bench.full(500, value), f"a{value}", tier)
            bench.wait_out(ticket)
            buffer, load = bench.load(ticket, f"a{value}")
            bench.wait_load(load)
            bench.expect(buffer, value)
            bench.device.drain()
        except OffloadError as error:
            told.append(str(error))
        ticket = buffer = load = None
    left = bench.left()
    bench.close()
    assert (bench.streams.races, left) == ([], NOTHING), seed
    # compute may have been let past a load that failed later, but past no other
    assert len(bench.wrong) <= len(told), (seed, bench.wrong)
    return told


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", ["at_issue", "running"])
def test_a_copy_that_fails_is_named_and_alone(kind: str, tier: str, disk: dict[str, Disk]) -> None:
    for number in range(6):
        for seed in range(8):
            told = shaken(Faults(**{kind: frozenset([number])}), seed, disk, tier)
            assert len(told) == 1, (number, seed)
            assert re.match(rf"a{number // 2 + 1} \(500 bytes\) could not be", told[0]), told


def test_a_load_that_failed_behind_its_wait_is_told_by_the_next() -> None:
    class Slow(SimulatedStreams):
        def _advance(self) -> None:
            return None

    bench = bench_of(0, streams=Slow, faults=Faults(running=frozenset([2])))
    first, second = (bench.out(bench.full(64, v), f"a{v}") for v in (1, 2))
    with bench.unseen():
        buffer, load = bench.load(first, "a1")
        bench.wait_load(load)
    bench.streams.drain()
    del first, buffer, load
    raised = ""
    try:
        bench.device.drain()
    except OffloadError as error:
        raised = str(error)
    assert raised.startswith("a1 (64 bytes) could not be loaded from pinned host memory: copy 2")
    # once: what else there is goes on
    bench.wait_out(second)
    buffer, load = bench.load(second, "a2")
    bench.wait_load(load)
    bench.expect(buffer, 2)
    del second, buffer, load
    assert (bench.left(), bench.wrong) == (NOTHING, [])
    bench.close()


def test_a_part_of_a_load_that_fails_is_told_though_the_rest_came(disk: dict[str, Disk]) -> None:
    parts = 3
    for seed in range(20):
        # the parts go out, and the first that comes back fails
        bench = bench_of(seed, disk, faults=Faults(running=frozenset([parts])))
        ticket = bench.out(bench.full(parts * PAGE, 1), "a1", "disk", "device_to_disk")
        bench.wait_out(ticket)
        with pytest.raises(OffloadError, match=r"a1 \(12288 bytes\) could not be loaded"):
            bench.wait_load(bench.load(ticket, "a1", "disk_to_device")[1])
            bench.device.drain()
        del ticket
        with suppress(OffloadError):  # again, where the wait has seen it come
            bench.device.drain()
        assert bench.left() == NOTHING, seed
        bench.close()


def test_without_a_thread_to_see_ends_nothing_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = bench_of(0)
    x = bench.full(64, 1)
    with monkeypatch.context() as patch:

        def refuse(thread: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(OffloadError, match=r"offcompile-d2h-ends cannot be started .*ulimit"):
            bench.out(x)
    bench.wait_out(bench.out(x))
    del x
    assert (bench.left(), bench.wrong) == (NOTHING, [])
    bench.close()


def test_no_room_on_the_device_is_named_and_nothing_is_held() -> None:
    bench = bench_of(0, faults=Faults(allocating=frozenset([1])))
    ticket = bench.out(bench.full(64, 1))
    with pytest.raises(DeviceFull, match=r"simulated:0 is out of memory.*64 bytes.*planted"):
        bench.load(ticket)
    # those who look for torch's own error find it
    assert issubclass(DeviceFull, torch.OutOfMemoryError)
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    bench.expect(buffer, 1)
    del ticket, buffer, load
    assert (bench.left(), bench.wrong) == (NOTHING, [])
    bench.close()


# -- the rest ------------------------------------------------------------------------------------


def test_two_devices_do_not_meet() -> None:
    one, other = (bench_of(seed, faults=Faults(at_issue=frozenset([seed]))) for seed in (99, 0))
    failing = other.out(other.full(64, 1), "b")
    train(one)
    with pytest.raises(OffloadError, match=r"b \(64 bytes\) could not be copied out"):
        other.wait_out(failing)
    del failing
    train(other)
    for bench in (one, other):
        bench.settle()
        assert (bench.streams.races, bench.wrong) == ([], [])
        bench.close()
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.endswith("-ends")}


def test_a_mark_of_something_else_is_refused() -> None:
    bench = bench_of(0)
    x = bench.full(64, 1)
    ended: list[Copy] = []
    copy = bench.device.copy_out(
        "d2h", x, bench.device.slot(x, "host"), [Point()], Label("out", "x"), ended.append
    )
    bench.device.drain()
    assert ended == [copy] and "A Point is no point on simulated:0" in str(copy.error)
    bench.close()


def test_an_end_is_told_once_and_before_it_shows() -> None:
    for seed in range(30):
        bench = bench_of(seed)
        told: list[bool] = []
        x = bench.full(64, 1)
        slot = bench.device.slot(x, "host")
        out, back = Label("out", "x"), Label("load", "x")

        def on_end(copy: Copy, told: list[bool] = told) -> None:
            told.append(copy.ended)

        first = bench.device.copy_out("d2h", x, slot, [bench.device.mark()], out, on_end)
        y = bench.device.allocate(slot, partial(int))
        after = [bench.device.mark(), first]
        second = bench.device.copy_in("h2d", slot, y, after, back, on_end)
        bench.device.wait(second)
        bench.expect(y, 1)
        bench.settle()
        assert told == [False, False] and first.ended and second.ended
        assert (bench.wrong, bench.streams.races) == ([], [])
        bench.close()


def test_tiers_and_settings_that_do_not_exist_are_refused(disk: dict[str, Disk]) -> None:
    bench = bench_of(0, limit_bytes=100)
    with pytest.raises(OffloadError, match=r"no tier 'tape'.*this runtime has: host\."):
        bench.out(bench.full(64, 1), tier="tape")
    with pytest.raises(SpillFull, match="101 bytes do not fit: 0 of 100 are used"):
        bench.out(bench.full(101, 1))
    bench.close()
    sim = SimulatedStreams(0)
    with pytest.raises(OffloadError, match="staging_bytes is 4096: it must be at least 16384"):
        CudaDevice(sim, sim.arena(), {}, staging_bytes=4096)
    with pytest.raises(OffloadError, match="files on the tier `disk` only, not on host"):
        CudaDevice(sim, sim.arena(), {"host": disk["disk"]})


def count_up(data: np.ndarray) -> None:
    data[:] = np.arange(data.size) % 251


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, STAGING, STAGING + 1])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_size_comes_back(tier: str, nbytes: int, disk: dict[str, Disk]) -> None:
    bench = bench_of(1, disk)
    x = bench.streams.empty(nbytes)
    bench.streams.launch(
        lambda data: np.copyto(data, np.arange(data.size) % 251, casting="unsafe"), (), (x,)
    )
    ticket = bench.out(x, tier=tier)
    bench.wait_out(ticket)
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    bench.settle()
    want = torch.arange(nbytes).remainder(251).to(torch.uint8)
    assert torch.equal(buffer, want) and buffer.storage_offset() == 0
    del x, ticket, buffer, load
    assert bench.left() == NOTHING
    bench.close()


def test_views_and_strides_move_the_bytes_that_lie_there() -> None:
    whole = torch.arange(64, dtype=torch.int32).reshape(4, 16)
    part = whole[1:3]
    assert torch.equal(flat_bytes(part), part.reshape(-1).view(torch.uint8))
    turned = part.t()
    assert torch.equal(flat_bytes(turned), part.reshape(-1).view(torch.uint8))
    assert flat_bytes(part).untyped_storage().data_ptr() == whole.data_ptr()


def test_a_storage_tells_of_its_death_whoever_held_it() -> None:
    died: list[str] = []
    x = torch.empty(64, dtype=torch.uint8)
    when_storage_dies(x, lambda: died.append(threading.current_thread().name))
    view = x.view(torch.float32)[2:]
    del x
    weight = torch.ones(14, requires_grad=True)
    # from here on only the graph, in C++, holds it
    loss = (weight * view).sum()
    del view
    gc.collect()
    assert died == []
    holder = [loss]
    del loss
    last = threading.Thread(target=holder.clear, name="last")
    last.start()
    last.join()
    assert died == ["last"]


def test_counters_and_recordings_know_of_copies() -> None:
    reset_counters()
    bench = bench_of(0)
    bench.device.timed = True
    with record() as recording:
        train(bench, layers=3)
        bench.settle()
    told = counters()
    assert (told["moves"], told["bytes_out"], told["bytes_in"]) == (6, 192, 192)
    ends = recording.kinds("end_out", "end_load")
    assert sorted((e.kind, e.tag, e.lane) for e in ends) == sorted(
        [("end_out", f"a{n}", "d2h") for n in range(3)]
        + [("end_load", f"a{n}", "h2d") for n in range(3)]
    )
    assert all(event.duration_ns >= 0 for event in ends)
    bench.close()


class Registrar:
    def register(self, address: int, nbytes: int) -> int:
        return 0

    def unregister(self, address: int) -> int:
        return 0


def test_it_moves_through_the_real_arena(disk: dict[str, Disk]) -> None:
    sim = SimulatedStreams(0)
    disk["disk"].streams = sim
    arena = HostArena(1 << 20, registrar=Registrar())
    device = CudaDevice(sim, arena, disk, STAGING)
    bench = Bench(sim, device, Mover(device))
    train(bench, 5000)
    train(bench, 5000, "disk")
    bench.settle()
    bench.close()
    assert bench.wrong == []
    # the simulation keeps what it did not make
    del sim, device, bench, disk["disk"].streams
    gc.collect()
    assert (arena.used_bytes, arena.peak_bytes > 0) == (0, True)
    arena.close()


def test_nothing_uses_record_stream() -> None:
    rooms = [*ROOT.glob("runtime/**/*.py"), *ROOT.glob("offcompile/*.py")]
    assert len(rooms) > 30
    assert [path.name for path in rooms if ".record_stream(" in path.read_text()] == []
