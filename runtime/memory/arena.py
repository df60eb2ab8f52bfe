"""Memory for staging and reload buffers: allocated from the system once, touched, and kept.

The first touch of fresh memory can be slower than the disk, so buffers live in one persistent
mapping. It is private: RLIMIT_DATA counts it like any other allocation.
"""

from __future__ import annotations

import weakref
from collections import deque

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES, Mapping, page_multiple
from offcompile.runtime.base.process_memory import machine_memory_bytes

from .blocks import BlockPool, MemoryBlock, Segment


class Arena(BlockPool):
    """Allocates whole pages by best fit from one mapping; other blocks get mappings of their own.

    used_bytes: the part of the arena itself that is handed out. overflow_bytes: mapped outside it
    now. peak_bytes: maximum of used and overflow together.
    A forked child gets its own copy of everything.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise OffloadError(f"an arena of {nbytes} bytes is not possible: give 0 or more")
        super().__init__(PAGE_BYTES)
        self._unmapped: deque[int] = deque()  # as `_returned`, for blocks outside
        self._overflow_bytes = 0
        addresses = _reserve(page_multiple(nbytes))
        self._segment = Segment.of(addresses, addresses.nbytes)
        self.ensure(nbytes)

    @property
    def overflow_bytes(self) -> int:
        with self._lock:
            self._settle()
            return self._overflow_bytes

    def ensure(self, nbytes: int) -> None:
        """Grow to a capacity of at least `nbytes`, touched; blocks do not move."""
        with self._growing:
            start = self._capacity_bytes
            more = page_multiple(nbytes) - start
            if more <= 0:
                return
            if start + more > self._segment.nbytes:
                raise OffloadError(
                    f"the arena cannot grow to {nbytes} bytes: it has room for "
                    f"{self._segment.nbytes} (the memory of this machine, or what `ulimit -v` "
                    "left): lower `memory`"
                )
            self._segment.mapping.open(start, more)
            self._segment.mapping.touch(start, more)
            with self._lock:
                self._add(start, more)

    def block(self, nbytes: int) -> MemoryBlock:
        """Allocate `nbytes`; raises OffloadError if even the system has no memory left."""
        if nbytes < 0:
            raise OffloadError(f"a block of {nbytes} bytes is not possible: give 0 or more")
        padded = page_multiple(max(nbytes, 1))
        with self._lock:
            self._settle()
            at = self._carve(padded, PAGE_BYTES)
        if at is None:
            return self._outside(nbytes, padded)
        return self._block(nbytes, padded, self._segment, at)

    def _outside(self, nbytes: int, padded: int) -> MemoryBlock:
        own = Mapping(padded)
        own.open(0, padded)
        with self._lock:
            self._settle()
            self._overflow_bytes += padded
            self._note_peak()
        block = MemoryBlock.of(nbytes, padded, Segment.of(own, padded), 0)
        note = weakref.finalize(block.array, _unmap, own, self._unmapped, padded)
        note.atexit = False
        return block

    def _settle(self) -> None:
        super()._settle()
        while self._unmapped:
            self._overflow_bytes -= self._unmapped.popleft()

    def _held_bytes(self) -> int:
        return self._used_bytes + self._overflow_bytes


def _reserve(nbytes: int) -> Mapping:
    """Reserve addresses for all of the machine's memory, so that the arena can grow in place."""
    ample = max(nbytes, machine_memory_bytes())
    try:
        return Mapping(ample)
    except OffloadError:  # address space itself is limited (ulimit -v)
        return Mapping(max(nbytes, 1))


def _unmap(mapping: Mapping, unmapped: deque[int], padded: int) -> None:
    mapping.unmap()
    unmapped.append(padded)
