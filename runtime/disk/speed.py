"""How fast a directory takes and gives back what is spilled, through a store like the runtime's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from offcompile.runtime.base.mapping import PAGE_BYTES, Mapping

_CHUNK_BYTES = 8 << 20
_CHUNKS = 8
_LATENCY_READS = 32


class DiskSpeed(NamedTuple):
    """Of one reader or one writer: bytes in a microsecond, and what a small read waits."""

    read_bytes_per_us: float
    write_bytes_per_us: float
    latency_us: float


class Store(Protocol):
    """The part of a `SpillStore` that is timed."""

    @property
    def direct(self) -> bool: ...
    def allocate(self, nbytes: int, /) -> Any: ...
    def write(self, extent: Any, start: int, source: memoryview, /) -> None: ...
    def read(self, extent: Any, start: int, target: memoryview, /) -> None: ...
    def flush(self) -> None: ...


def speed_of(store: Store, seconds: float) -> DiskSpeed:
    """Write and read 64 MiB in 8 MiB chunks, again and again for `seconds`.

    The first pass over fresh space is slower than those after it and is not counted.
    """
    pages = Mapping(_CHUNK_BYTES)
    pages.open(0, _CHUNK_BYTES)
    chunk_view = pages.view(0, _CHUNK_BYTES)
    extent = store.allocate(_CHUNKS * _CHUNK_BYTES)
    torch.frombuffer(chunk_view, dtype=torch.uint8).random_(
        0, 256
    )  # some disks are quicker on zeros

    def write(chunk: int) -> None:
        store.write(extent, chunk * _CHUNK_BYTES, chunk_view)

    def read(chunk: int) -> None:
        store.read(extent, chunk * _CHUNK_BYTES, chunk_view)

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
    page = chunk_view[:PAGE_BYTES]
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
