"""The CUDA device and the disk: waits, demand, cancelling, refusals, closing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cuda_bench import (
    NOTHING,
    PAGE,
    STAGING,
    Disk,
    bench_of,
    fill,
)

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import record
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda.copies import CudaCopy
from offcompile.runtime.device.interface import How
from offcompile.runtime.moves.saved import Load, Saved


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[dict[str, Disk]]:
    with Disk([tmp_path], reserve_bytes=0) as store:
        yield {"disk": store}


OUT, IN = "device_to_disk", "disk_to_device"


def until(true: Callable[[], bool]) -> None:
    """Let other threads go on until they have got there."""
    for _ in range(60_000):
        if true():
            return
        threading.Event().wait(0.0005)
    raise AssertionError("another thread never got there")


def test_a_wait_for_the_disk_ends_when_the_tensor_was_read(disk: dict[str, Disk]) -> None:
    bench = bench_of(0, disk)
    disk["disk"].gate = threading.Event()
    # the ring holds just as much: more would have to wait for the disk
    x = bench.full(STAGING, 7)
    ticket = bench.out(x, tier="disk", lane=OUT)
    bench.wait_out(ticket)
    copy = tickets.find(ticket, Saved).copy
    assert copy is not None and not copy.ended
    bench.streams.launch(fill(0), (), (x,))
    disk["disk"].gate.set()
    buffer, load = bench.load(ticket, lane=IN)
    bench.wait_load(load)
    bench.expect(buffer, 7)
    del copy, x, ticket, buffer, load
    assert (bench.left(), bench.wrong, bench.streams.races) == (NOTHING, [], [])
    bench.close()


def test_a_load_that_is_wanted_now_goes_first(disk: dict[str, Disk]) -> None:
    bench = bench_of(0, disk)
    saved = [bench.out(bench.full(5000, v), f"a{v}", "disk", OUT) for v in range(4)]
    bench.settle()
    disk["disk"].gate = threading.Event()
    with record() as recording:
        loads = [bench.load(ticket, f"a{v}", IN) for v, ticket in enumerate(saved)]
        until(lambda: len(recording.kinds("begin_load")) == 1)
        last = tickets.find(loads[3][1], Load).copy
        assert last is not None
        opening = threading.Timer(0.01, disk["disk"].gate.set)
        opening.start()
        waited = bench.device.wait(last)
        bench.settle()
    assert waited.how is How.PROMOTED
    begun = [event.tag for event in recording.kinds("begin_load")]
    assert begun == ["a0", "a3", "a1", "a2"]
    opening.join()
    del last, saved, loads
    assert bench.left() == NOTHING
    bench.close()


def test_what_has_not_begun_is_cancelled_when_nobody_wants_it(disk: dict[str, Disk]) -> None:
    bench = bench_of(0, disk)
    disk["disk"].gate = threading.Event()
    first = bench.out(bench.full(100, 1), "first", "disk", OUT)
    second = bench.out(bench.full(100, 2), "second", "disk", OUT)
    copy = tickets.find(second, Saved).copy
    assert isinstance(copy, CudaCopy)
    running = tickets.find(first, Saved).copy
    assert isinstance(running, CudaCopy)
    until(running.issued.is_set)
    del second
    bench.mover.sweep()
    assert copy.ended and "was cancelled" in str(copy.error) and copy.keep is None
    disk["disk"].gate.set()
    host = bench.out(bench.full(100, 3), "host")
    queued = tickets.find(host, Saved).copy
    assert queued is not None and not bench.device.cancel(queued)
    del running, first, host
    assert bench.left() == NOTHING
    assert disk["disk"].bytes_written == PAGE
    bench.close()


@pytest.mark.parametrize("reading", [False, True])
def test_what_the_disk_refuses_is_raised_where_the_data_is_needed(
    reading: bool, disk: dict[str, Disk]
) -> None:
    bench = bench_of(0, disk)
    disk["disk"].fail = None if reading else OSError(28, "No space left on device")
    ticket = bench.out(bench.full(2 * STAGING, 1), "a", "disk", OUT)
    if reading:
        bench.wait_out(ticket)
    bench.device.drain()
    disk["disk"].fail = OSError(5, "Input/output error") if reading else None
    told = ""
    try:
        buffer, load = bench.load(ticket, "a", IN)
        bench.wait_load(load)
    except OffloadError as error:
        told = str(error)
    assert told.startswith("a (32768 bytes) could not be loaded from")
    assert ("it had not been written there" in told) is not reading
    assert ("Input/output error" if reading else "No space left on device") in told
    disk["disk"].fail = None
    del ticket, buffer, load
    assert bench.left() == NOTHING
    bench.close()


def test_close_lets_go_of_whoever_waits(disk: dict[str, Disk]) -> None:
    bench = bench_of(0, disk)
    disk["disk"].gate = threading.Event()
    first = bench.out(bench.full(100, 1), "first", "disk", OUT)
    second = bench.out(bench.full(100, 2), "second", "disk", OUT)
    running = tickets.find(first, Saved).copy
    assert isinstance(running, CudaCopy)
    until(running.issued.is_set)
    told: list[str] = []

    def wait() -> None:
        try:
            bench.wait_out(second)
        except OffloadError as error:
            told.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: tickets.find(second, Saved).awaited)
    closing = threading.Thread(target=bench.close)
    closing.start()
    until(lambda: bench.device._in_flight.closed)
    disk["disk"].gate.set()
    closing.join()
    waiting.join()
    # either it was written before the queue was cleared, or the wait says that it was not
    assert told == [] or "second (100 bytes) could not be copied out" in told[0]
    with pytest.raises(OffloadError, match="The cuda runtime is closed: late cannot move"):
        bench.out(bench.full(100, 3), "late")
    bench.device.close()
