"""Pinned host memory, which a GPU copies to and from at full speed: mapped, touched, registered.

torch's own pinned allocator rounds sizes up to powers of two; these blocks have exact sizes.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import forks, host_limits
from offcompile.runtime.base.host_limits import HostBound
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.disk.extents import FreeRanges

from . import pinning, segments
from .pinning import CudaRegistrar, Registrar
from .segments import Segment

__all__ = ["ALIGN_BYTES", "SEGMENT_BYTES", "HostArena", "HostBlock", "HostFull", "Registrar"]

#: alignment of blocks, unless more is requested
ALIGN_BYTES = 256
#: minimum growth of the arena, unless a limit leaves less
SEGMENT_BYTES = 256 << 20
#: gap between segments, so that their free ranges never merge
_GAP_BYTES = PAGE_BYTES


class HostFull(OffloadError):
    """Raised if there is no room for a block; names the request, the free bytes and the bound."""


class _Owned(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array whose finalizer frees its block (views of plain arrays would not keep it alive)."""


@dataclass(eq=False)
class HostBlock:
    """A block of `nbytes` at `address`, held as long as this or any tensor over it lives.

    pinned: True if it is registered with CUDA. padded_nbytes: rounded up to the requested
    alignment; all of it belongs to the block, and the bytes after `nbytes` are undefined.
    """

    nbytes: int
    address: int
    padded_nbytes: int
    pinned: bool
    _array: _Owned | None = field(repr=False)

    @property
    def tensor(self) -> torch.Tensor:
        """A flat uint8 CPU tensor of exactly `nbytes`; its storage keeps the memory alive."""
        return torch.from_numpy(self._held()[: self.nbytes])

    @property
    def view(self) -> memoryview:
        """All `padded_nbytes`, for direct I/O."""
        return self._held().data

    def free(self) -> None:
        """Drop the memory: it is reused once no tensor or view over it is left."""
        self._array = None

    def _held(self) -> _Owned:
        array = self._array
        if array is None:
            raise OffloadError(
                f"a host block of {self.nbytes} bytes was used after free(): take another one"
            )
        return array


class HostArena:
    """Allocates host memory by best fit, from segments that are registered as a whole.

    limit_bytes: limit on the arena's size; None: 85% of the machine's memory, or the cgroup's. The
    machine's free memory limits every growth as well.
    ready_bytes: mapped, touched and registered up front, as one segment.
    threads: number of threads that touch fresh memory.

    pinned: True if no registration was refused so far. capacity_bytes: total size of the segments.
    used_bytes, peak_bytes: bytes handed out, and their maximum. Thread-safe. After a refused
    registration the arena goes on in pageable memory and warns, once per process.
    A forked child has neither the arena nor the memory of pinned blocks (touching it there kills
    the child). The memory of pinned blocks that outlive their arena is unregistered by a later
    `close` or growth of any arena, or at exit.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        ready_bytes: int = 0,
        registrar: Registrar | None = None,
        threads: int = 4,
    ) -> None:
        for name, value in (("limit_bytes", limit_bytes or 0), ("ready_bytes", ready_bytes)):
            if value < 0:
                raise OffloadError(f"{name}={value} is not possible: give 0 or more")
        if threads < 1:
            raise OffloadError(f"threads={threads} is not possible: give 1 or more")
        self._limit = _limit(limit_bytes)
        self._registrar = registrar or CudaRegistrar()
        self._threads = threads
        self._pinned = True
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._segments: list[Segment] = []
        self._free = FreeRanges()
        # filled by finalizers of blocks, at any line here, even with the lock held (collector)
        self._returned: deque[tuple[int, int]] = deque()
        self._used_bytes = self._peak_bytes = self._end = 0
        self._owner = os.getpid()
        self._is_open = True
        forks.watch(self)
        if ready_bytes:
            with self._growing:
                self._grow(ready_bytes, _up(ready_bytes, ALIGN_BYTES), ready=True)

    @property
    def pinned(self) -> bool:
        return self._pinned

    @property
    def capacity_bytes(self) -> int:
        with self._lock:
            return self._capacity_bytes()

    @property
    def used_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Make `peak_bytes` count from now."""
        with self._lock:
            self._settle()
            self._peak_bytes = self._used_bytes

    def block(self, nbytes: int, align_bytes: int = ALIGN_BYTES) -> HostBlock:
        """Allocate `nbytes` at a multiple of `align_bytes` (256, or up to 4096 for direct I/O).

        Raises HostFull if no free range fits and the bounds do not allow growth.
        """
        if nbytes < 0:
            raise OffloadError(f"a block of {nbytes} bytes is not possible: give 0 or more")
        if align_bytes < 1 or align_bytes & (align_bytes - 1) or align_bytes > PAGE_BYTES:
            raise OffloadError(
                f"align_bytes={align_bytes} is not possible: give a power of two up to {PAGE_BYTES}"
            )
        align = max(align_bytes, ALIGN_BYTES)
        padded = _up(max(nbytes, 1), align)
        taken = self._take(padded, align)
        if taken is None:
            with self._growing:
                # another thread may have grown it meanwhile
                taken = self._take(padded, align) or self._grow(nbytes, padded)
        assert taken is not None
        segment, at = taken
        within = at - segment.start
        array = segment.array[within : within + padded].view(_Owned)
        note = weakref.finalize(array, _give_back, segment, self._returned, at, padded)
        note.atexit = False
        pinned = segment.number is not None
        return HostBlock(nbytes, segment.mapping.address + within, padded, pinned, array)

    def close(self) -> None:
        """Release the memory, once the devices are done with it; later calls release blocks that
        have died since.

        Memory still held by blocks and tensors stays registered until they are dead.
        """
        if os.getpid() != self._owner:
            return
        with self._growing:
            with self._lock:
                self._is_open = False
                self._settle()
                self._segments.clear()
                self._free = FreeRanges()
            pinning.sweep()

    def _take(self, padded: int, align: int) -> tuple[Segment, int] | None:
        """Take `padded` from the smallest free range that fits: (segment, offset), or None."""
        with self._lock:
            self._check()
            self._settle()
            return self._carve(padded, align)

    def _carve(self, padded: int, align: int) -> tuple[Segment, int] | None:
        if align == ALIGN_BYTES:
            # every free range is aligned to it
            at = self._free.take_best(padded)
        else:
            fitting = [
                (size, start)
                for start, size in self._free.ranges()
                if _up(start, align) + padded <= start + size
            ]
            if not fitting:
                return None
            at = self._free.take_next(_up(min(fitting)[1], align), padded)
        if at is None:
            return None
        self._used_bytes += padded
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        segment = next(s for s in self._segments if s.start <= at < s.start + s.nbytes)
        return segment, at

    def _grow(
        self, asked_bytes: int, padded: int, ready: bool = False
    ) -> tuple[Segment, int] | None:
        """Add a segment with room for `padded` and later blocks, and take `padded` from it.

        ready: add a segment of exactly `padded`, and take nothing. The caller holds `_growing`;
        other threads can still allocate from the existing segments.
        """
        pinning.sweep()
        bound = self._bound()
        if bound.nbytes < padded and bound.nbytes + self._empty_bytes() >= padded:
            self._let_empty_go()
            pinning.sweep()
            bound = self._bound()
        if bound.nbytes < padded:
            raise self._full(asked_bytes, bound)
        wanted = padded if ready else max(padded, SEGMENT_BYTES)
        size = min(wanted, bound.nbytes) // ALIGN_BYTES * ALIGN_BYTES
        try:
            segment = self._segment(size)
        except HostFull:
            if size == padded:
                raise
            segment = self._segment(padded)
        with self._lock:
            segment.start = self._end
            self._end = page_multiple(segment.start + segment.nbytes) + _GAP_BYTES
            self._segments.append(segment)
            self._free.add(segment.start, segment.nbytes)
            return None if ready else self._carve(padded, PAGE_BYTES)

    def _segment(self, nbytes: int) -> Segment:
        try:
            segment, code = segments.make(
                nbytes, self._registrar if self._pinned else None, self._threads
            )
        except OffloadError as error:
            raise HostFull(f"host memory cannot grow by {nbytes} bytes: {error}") from error
        if code:
            self._pinned = False
            pinning.warn_pageable(nbytes, code)
        return segment

    def _empty(self) -> list[Segment]:
        """Returns the segments without a block; call it with the lock held."""
        self._settle()
        whole = set(self._free.ranges())
        return [s for s in self._segments if (s.start, s.nbytes) in whole]

    def _empty_bytes(self) -> int:
        with self._lock:
            return sum(segment.nbytes for segment in self._empty())

    def _let_empty_go(self) -> None:
        with self._lock:
            for segment in self._empty():
                self._free.take_next(segment.start, segment.nbytes)
                self._segments.remove(segment)

    def _bound(self) -> HostBound:
        """Returns the tightest bound on growth now."""
        limit = self._limit
        own = HostBound(limit.nbytes - self.capacity_bytes, limit.source, limit.advice)
        return min([own, *host_limits.growth_bounds()], key=lambda bound: bound.nbytes)

    def _full(self, nbytes: int, bound: HostBound) -> HostFull:
        with self._lock:
            capacity, free, gap = self._capacity_bytes(), self._free.total, self._free.largest()
        return HostFull(
            f"host memory is full: {nbytes} bytes were asked for; of {capacity} bytes {free} are "
            f"free, at most {gap} in one piece, and {bound.nbytes} more can be had. The bound is "
            f"{bound.source}: {bound.advice}."
        )

    def _capacity_bytes(self) -> int:
        return sum(segment.nbytes for segment in self._segments)

    def _settle(self) -> None:
        """Reclaim dead blocks; call it with the lock held."""
        while self._returned:
            at, padded = self._returned.popleft()
            self._used_bytes -= padded
            self._free.add(at, padded)

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise OffloadError(
                f"the host arena of process {self._owner} was used in {os.getpid()}, forked from "
                "it: make an arena, or compile the model, in the process that runs it"
            )
        if not self._is_open:
            raise OffloadError("the host arena is closed: make another one")

    def before_fork(self) -> None:
        self._growing.acquire()
        self._lock.acquire()

    def after_fork(self, in_child: bool) -> None:
        self._lock.release()
        self._growing.release()


def _limit(limit_bytes: int | None) -> HostBound:
    if limit_bytes is not None:
        return HostBound(
            limit_bytes,
            f"the arena's own limit of {limit_bytes} bytes",
            'raise it with options={"host_memory": …}',
        )
    nbytes = host_limits.default_limit_bytes()
    return HostBound(
        nbytes,
        f"{host_limits.SHARE_PERCENT}% of this machine's memory ({nbytes} bytes)",
        'raise it with options={"host_memory": …}, or move to disk with options={"spill": …}',
    )


def _up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _give_back(segment: Segment, returned: deque[tuple[int, int]], at: int, padded: int) -> None:
    # holding `segment` here keeps it mapped and registered as long as one of its blocks lives
    returned.append((at, padded))
