"""Pinned host memory, which a GPU copies to and from at full speed: mapped, touched, registered.

torch's own pinned allocator rounds sizes up to powers of two; these blocks have exact sizes.
"""

from __future__ import annotations

import os

from offcompile.ir import OffloadError
from offcompile.runtime.base import host_limits
from offcompile.runtime.base.host_limits import HostBound
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.disk.extents import FreeRanges

from . import pinning, segments
from .blocks import BlockPool, MemoryBlock, Segment, round_up
from .pinning import CudaRegistrar, Registrar

#: alignment of blocks, unless more is requested
ALIGN_BYTES = 256
#: minimum growth of the arena, unless a limit leaves less
SEGMENT_BYTES = 256 << 20
#: gap between segments, so that their free ranges never merge
_GAP_BYTES = PAGE_BYTES


class HostFull(OffloadError):
    """Raised if there is no room for a block; names the request, the free bytes and the bound."""


class HostArena(BlockPool):
    """Allocates host memory by best fit, from segments that are registered as a whole.

    limit_bytes: limit on the arena's size; None: 85% of the machine's memory, or the cgroup's. The
    machine's free memory limits every growth as well.
    ready_bytes: mapped, touched and registered up front, as one segment; may be as much as the
    limit.
    threads: number of threads that touch fresh memory.

    pinned: True if no registration was refused so far. After a refused registration the arena goes
    on in pageable memory and warns, once per process.
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
        super().__init__(ALIGN_BYTES)
        self._limit = _limit(limit_bytes)
        self._registrar = registrar or CudaRegistrar()
        self._threads = threads
        self._pinned = True
        self._segments: list[Segment] = []
        self._end = 0
        self._owner = os.getpid()
        self._is_open = True
        if ready_bytes:
            with self._growing:
                self._grow(ready_bytes, self._ready_whole(ready_bytes), ready=True)

    def _ready_whole(self, ready_bytes: int) -> int:
        """Rounded up to whole units, or down where a limit of odd size lets no more in."""
        padded = round_up(ready_bytes, ALIGN_BYTES)
        if ready_bytes <= self._limit.nbytes < padded:
            return padded - ALIGN_BYTES or padded
        return padded

    @property
    def pinned(self) -> bool:
        return self._pinned

    def block(self, nbytes: int, align_bytes: int = ALIGN_BYTES) -> MemoryBlock:
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
        padded = round_up(max(nbytes, 1), align)
        taken = self._take(padded, align)
        if taken is None:
            with self._growing:
                # another thread may have grown it meanwhile
                taken = self._take(padded, align) or self._grow(nbytes, padded)
        assert taken is not None
        segment, at = taken
        return self._block(nbytes, padded, segment, at)

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
                self._capacity_bytes = 0
            pinning.sweep()

    def _take(self, padded: int, align: int) -> tuple[Segment, int] | None:
        """Take `padded` from the smallest free range that fits: (segment, offset), or None."""
        with self._lock:
            self._check()
            self._settle()
            at = self._carve(padded, align)
            return None if at is None else (self._segment_at(at), at)

    def _segment_at(self, at: int) -> Segment:
        return next(s for s in self._segments if s.start <= at < s.start + s.nbytes)

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
            self._add(segment.start, segment.nbytes)
            at = None if ready else self._carve(padded, PAGE_BYTES)
            # it may lie in an older segment, where another thread freed a block meanwhile
            return None if at is None else (self._segment_at(at), at)

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
                self._capacity_bytes -= segment.nbytes

    def _bound(self) -> HostBound:
        """Returns the tightest bound on growth now."""
        limit = self._limit
        own = HostBound(limit.nbytes - self.capacity_bytes, limit.source, limit.advice)
        return min([own, *host_limits.growth_bounds()], key=lambda bound: bound.nbytes)

    def _full(self, nbytes: int, bound: HostBound) -> HostFull:
        with self._lock:
            capacity, free, gap = self._capacity_bytes, self._free.total, self._free.largest()
        return HostFull(
            f"host memory is full: {nbytes} bytes were asked for; of {capacity} bytes {free} are "
            f"free, at most {gap} in one piece, and {bound.nbytes} more can be had. The bound is "
            f"{bound.source}: {bound.advice}."
        )

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise OffloadError(
                f"the host arena of process {self._owner} was used in {os.getpid()}, forked from "
                "it: make an arena, or compile the model, in the process that runs it"
            )
        if not self._is_open:
            raise OffloadError("the host arena is closed: make another one")


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
