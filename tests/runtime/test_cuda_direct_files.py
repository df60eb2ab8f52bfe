"""Between a card and spill files past the host: the CUDA device with a library that is not cuFile.

The card is simulated streams, whose detector sees what the library reads and writes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuda_bench import NOTHING, PAGE, Bench, Disk, bench_of, train, wander
from fake_cufile import FakeLibrary
from simulated_streams import SimulatedStreams

from offcompile.ir import OffloadError
from offcompile.runtime.device.cuda import direct_files as cuda_direct_files
from offcompile.runtime.device.cuda.device import RATED_BYTES, CudaDevice
from offcompile.runtime.disk import gds
from offcompile.runtime.disk.checksums import VerifiedStore
from offcompile.runtime.disk.gds import CuFile

pytestmark = pytest.mark.usefixtures("on_a_disk")

OUT, IN = "device_to_disk", "disk_to_device"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of pages are large, and take several calls."""
    monkeypatch.setattr(cuda_direct_files, "LEAST_BYTES", 2 * PAGE)
    monkeypatch.setattr(gds, "CHUNK_BYTES", 2 * PAGE)


class CountingDisk(Disk):
    """`staged_bytes`: what went by way of host memory."""

    staged_bytes = 0

    def _touch(self, buffer: memoryview, write: bool) -> None:
        self.staged_bytes += len(buffer)
        super()._touch(buffer, write)


class VerifiedDisk(CountingDisk, VerifiedStore):
    pass


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[CountingDisk]:
    with CountingDisk([tmp_path], reserve_bytes=0) as store:
        yield store


def bench_with(library: FakeLibrary, disk: Disk, seed: int = 0, **named: Any) -> Bench:
    device = partial(CudaDevice, cufile=lambda: CuFile(library))
    bench = bench_of(seed, {"disk": disk}, device=device, **named)  # type: ignore[arg-type]
    held = bench.streams._watch._held

    def touch(writes: bool, pointer: int, nbytes: int) -> None:
        memory = held[max(start for start in held if start <= pointer)]
        bench.streams.touch(torch.from_numpy(memory.data), writes, "the library")

    library.touches = touch
    return bench


def there_and_back(bench: Bench, nbytes: int, value: int) -> None:
    ticket = bench.out(bench.full(nbytes, value), f"a{value}", "disk", OUT)
    bench.wait_out(ticket)
    buffer, load = bench.load(ticket, f"a{value}", IN)
    bench.wait_load(load)
    bench.expect(buffer, value)


def at_ease(bench: Bench) -> None:
    assert (bench.left(), bench.wrong, bench.streams.races) == (NOTHING, [], [])
    bench.close()


def test_large_tensors_go_past_the_host_both_ways(disk: CountingDisk) -> None:
    library = FakeLibrary()
    bench = bench_with(library, disk)
    there_and_back(bench, 6 * PAGE, 1)
    assert library.calls == [("write", 2 * PAGE)] * 3 + [("read", 2 * PAGE)] * 3
    assert disk.staged_bytes == 0
    assert disk.bytes_written == disk.bytes_read == 6 * PAGE
    at_ease(bench)


def test_what_is_no_whole_page_or_small_goes_through_it(disk: CountingDisk) -> None:
    library = FakeLibrary()
    bench = bench_with(library, disk)
    there_and_back(bench, 3 * PAGE + 100, 1)
    assert sum(nbytes for _, nbytes in library.calls) == 2 * 3 * PAGE
    assert disk.staged_bytes == 2 * PAGE
    library.calls.clear()
    there_and_back(bench, 2 * PAGE - 1, 2)
    assert library.calls == []
    at_ease(bench)


def test_what_lanes_reach_is_counted_whichever_way_they_take(disk: CountingDisk) -> None:
    bench = bench_with(FakeLibrary(), disk)
    there_and_back(bench, 6 * PAGE, 1)
    there_and_back(bench, PAGE + 5, 2)
    large = bench.full(RATED_BYTES, 3)
    for x in (large, bench.full(RATED_BYTES - 1, 4)):
        bench.wait_out(bench.out(x))
    bench.codec = "bitmask"
    there_and_back(bench, 6 * PAGE, 5)
    bench.settle()
    totals = bench.device.rates.totals()
    assert {lane: one[:2] for lane, one in totals.items()} == {
        OUT: (2, 7 * PAGE + 5),
        IN: (2, 7 * PAGE + 5),
        "d2h": (1, RATED_BYTES),
    }
    assert all(one.busy_ns > 0 for one in totals.values())
    del large, x
    at_ease(bench)


def test_packed_tensors_go_through_it(disk: CountingDisk) -> None:
    library = FakeLibrary()
    bench = bench_with(library, disk)
    bench.codec = "bitmask"
    there_and_back(bench, 8 * PAGE, 1)
    assert library.calls == [] and disk.staged_bytes > 0
    at_ease(bench)


@pytest.mark.parametrize("seed", range(4))
def test_memory_goes_round_without_a_race(seed: int, disk: CountingDisk) -> None:
    library = FakeLibrary()
    bench = bench_with(library, disk, seed, pace_s=0.0005 if seed % 2 else None)
    train(bench, 3 * PAGE + 8, "disk")
    wander(bench, seed, "disk", (64, 2 * PAGE, 5 * PAGE + 64))
    assert library.calls
    at_ease(bench)


def test_a_library_that_does_not_wait_for_the_card_is_found_out(disk: CountingDisk) -> None:
    found = 0
    for seed in range(3):
        library = FakeLibrary()
        bench = bench_with(library, disk, seed)
        assert bench.device._disk.direct is not None
        bench.device._disk.direct._streams = Hasty(bench.streams)  # type: ignore[assignment]
        there_and_back(bench, 4 * PAGE, 1)
        bench.settle()
        found += bool(bench.streams.races)
        bench.close()
    assert found == 3


class Hasty:
    """Streams whose events are waited for by nobody."""

    def __init__(self, streams: SimulatedStreams) -> None:
        self.record, self.on_card = streams.record, streams.on_card

    def synchronize(self, event: object) -> None:
        return None


@pytest.mark.parametrize("good_calls", [0, 1, 3, 4])
def test_after_a_failure_everything_goes_through_the_host_and_nothing_is_lost(
    good_calls: int, disk: CountingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """The tensor goes out in three calls and returns in three; the calls after the first fail."""
    library = FakeLibrary()
    library.good_calls = good_calls
    bench = bench_with(library, disk)
    with caplog.at_level(logging.INFO):
        there_and_back(bench, 6 * PAGE, 1)
        asked = len(library.calls)
        assert asked == good_calls + 1
        there_and_back(bench, 6 * PAGE, 2)
    assert len(library.calls) == asked
    (line,) = [record.getMessage() for record in caplog.records]
    way = "writing" if good_calls < 3 else "reading"
    assert f"{way} 8192 bytes" in line and "cuFile error 5011" in line and "\n" not in line
    assert line.endswith("From now on tensors go through host memory")
    assert disk.staged_bytes >= 3 * 6 * PAGE
    assert len(library.files) == 1
    at_ease(bench)
    assert not library.files


def test_an_error_of_the_disk_itself_is_named_all_the_same(disk: CountingDisk) -> None:
    library = FakeLibrary()
    library.good_calls = 0
    bench = bench_with(library, disk)
    disk.fail = OSError(5, "Input/output error")
    told = ""
    try:  # it is raised by whoever first sees it
        there_and_back(bench, 4 * PAGE, 1)
    except OffloadError as error:
        told = str(error)
    assert "a1 (16384 bytes) could not be" in told and "Input/output error" in told
    disk.fail = None
    assert bench.left() == NOTHING
    bench.close()


def test_files_are_registered_at_the_first_move_and_given_back(disk: CountingDisk) -> None:
    library = FakeLibrary()
    bench = bench_with(library, disk)
    there_and_back(bench, PAGE, 1)
    assert not library.files and not library.is_open
    there_and_back(bench, 4 * PAGE, 2)
    assert list(library.files.values()) == list(disk.descriptors)
    bench.settle()
    bench.close()
    assert not library.files


def test_files_that_the_library_refuses_cost_one_line(
    disk: CountingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    library = FakeLibrary()
    library.refuses = 5030
    bench = bench_with(library, disk)
    with caplog.at_level(logging.INFO):
        there_and_back(bench, 4 * PAGE, 1)
        there_and_back(bench, 4 * PAGE, 2)
    (line,) = [record.getMessage() for record in caplog.records]
    assert "registering a spill file (error 5030)" in line
    assert library.calls == [] and disk.staged_bytes == 4 * 4 * PAGE
    at_ease(bench)


def test_where_it_is_not_there_nobody_is_bothered(
    disk: CountingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    device = partial(CudaDevice, cufile=lambda: "no GPUDirect Storage: planted")
    bench = bench_of(0, {"disk": disk}, device=device)
    with caplog.at_level(logging.INFO):
        there_and_back(bench, 4 * PAGE, 1)
    assert not caplog.records and disk.staged_bytes == 2 * 4 * PAGE
    at_ease(bench)


def test_checksums_want_the_bytes_on_the_host(tmp_path: Path) -> None:
    library = FakeLibrary()
    with VerifiedDisk([tmp_path], reserve_bytes=0) as disk:
        bench = bench_with(library, disk)
        there_and_back(bench, 4 * PAGE, 1)
        assert library.calls == [] and not library.is_open
        assert disk.staged_bytes == 2 * 4 * PAGE
        at_ease(bench)


def test_files_in_the_page_cache_go_through_the_host(disk: CountingDisk) -> None:
    library = FakeLibrary()
    disk.direct = False
    bench = bench_with(library, disk)
    there_and_back(bench, 4 * PAGE, 1)
    assert library.calls == [] and not library.is_open
    at_ease(bench)


def test_directories_work_side_by_side(tmp_path: Path) -> None:
    library = FakeLibrary()
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with CountingDisk(places, reserve_bytes=0, stripe_bytes=2 * PAGE, weights=(1, 1)) as disk:
        bench = bench_of(
            0, {"disk": disk}, device=partial(CudaDevice, cufile=lambda: CuFile(library))
        )
        x = torch.from_numpy(np.arange(8 * PAGE, dtype=np.uint8))
        source = bench.streams.empty(8 * PAGE)
        bench.streams.launch(lambda data: np.copyto(data, x.numpy()), (), (source,))
        ticket = bench.out(source, "a", "disk", OUT)
        bench.wait_out(ticket)
        buffer, load = bench.load(ticket, "a", IN)
        bench.wait_load(load)
        bench.streams.drain()
        assert np.array_equal(buffer.numpy(), x.numpy())
        assert len(library.files) == 2 and disk.staged_bytes == 0
        del ticket, buffer, load, source
        at_ease(bench)
