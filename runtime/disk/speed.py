"""Measures how fast a directory writes and reads spilled data, using a store as in the runtime."""

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
    """Bytes per microsecond of a single reader and writer, and the latency of a small read."""

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
    """Write and read 64 MiB in 8 MiB chunks repeatedly for `seconds`.

    The first pass over fresh space is slower than later ones and is not counted.
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
        # if the page cache cannot be bypassed, empty it, so that the disk is measured and not RAM
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
        # far apart, so that read-ahead does not help
        at = turn * 7 % _LATENCY_READS * (extent.nbytes // _LATENCY_READS)
        begin = time.perf_counter_ns()
        store.read(extent, at, page)
        waits.append((time.perf_counter_ns() - begin) / 1000)
    return DiskSpeed(read_rate, write_rate, statistics.median(waits))


def _rate(move: Callable[[int], None], settle: Callable[[], None], seconds: float) -> float:
    """Returns bytes per microsecond over whole passes, for `seconds` but at least one pass."""
    begin = time.perf_counter_ns()
    passes = 0
    while not passes or time.perf_counter_ns() - begin < seconds * 1e9:
        for chunk in range(_CHUNKS):
            move(chunk)
        settle()
        passes += 1
    return passes * _CHUNKS * _CHUNK_BYTES * 1000 / (time.perf_counter_ns() - begin)
