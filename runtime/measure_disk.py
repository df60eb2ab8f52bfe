"""How fast a directory takes and gives back what is spilled, measured as the runtime does it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from offcompile.ir import OffloadError

from .arena import Arena
from .mapping import PAGE_BYTES
from .spill import SpillStore

_CHUNK_BYTES = 8 << 20
_CHUNKS = 8
_LATENCY_READS = 32


class DiskSpeed(NamedTuple):
    """Of one reader or one writer: bytes in a microsecond, and what a small read waits."""

    read_bytes_per_us: float
    write_bytes_per_us: float
    latency_us: float


def measure_disk(directory: str | os.PathLike[str], seconds: float = 0.5) -> DiskSpeed:
    """Write and read 64 MiB in 8 MiB chunks, again and again for `seconds`; leaves nothing behind.

    The first pass over fresh space is slower than those after it and is not counted.
    """
    if seconds <= 0:
        raise OffloadError(f"seconds={seconds}: give a positive time")
    block = Arena(_CHUNK_BYTES).block(_CHUNK_BYTES)
    with SpillStore([directory], reserve_bytes=0) as store:
        extent = store.allocate(_CHUNKS * _CHUNK_BYTES)
        block.tensor().random_(0, 256)  # some disks are quicker on zeros

        def write(chunk: int) -> None:
            store.write(extent, chunk * _CHUNK_BYTES, block.view)

        def read(chunk: int) -> None:
            store.read(extent, chunk * _CHUNK_BYTES, block.view)

        def settle() -> None:
            # where the page cache cannot be passed by, it is emptied: RAM is not the disk
            if not store.direct:
                store.flush()

        for chunk in range(_CHUNKS):
            write(chunk)
        settle()
        write_rate = _rate(write, settle, seconds / 2)
        read_rate = _rate(read, settle, seconds / 2)
        waits = []
        page = block.view[:PAGE_BYTES]
        for turn in range(_LATENCY_READS):
            # apart from each other, so that no read-ahead helps
            at = turn * 7 % _LATENCY_READS * (extent.nbytes // _LATENCY_READS)
            begin = time.perf_counter_ns()
            store.read(extent, at, page)
            waits.append((time.perf_counter_ns() - begin) / 1000)
    return DiskSpeed(read_rate, write_rate, statistics.median(waits))


def _rate(move: Callable[[int], None], settle: Callable[[], None], seconds: float) -> float:
    """Bytes in a microsecond over whole passes, for `seconds` or one pass."""
    begin = time.perf_counter_ns()
    passes = 0
    while not passes or time.perf_counter_ns() - begin < seconds * 1e9:
        for chunk in range(_CHUNKS):
            move(chunk)
        settle()
        passes += 1
    return passes * _CHUNKS * _CHUNK_BYTES * 1000 / (time.perf_counter_ns() - begin)
