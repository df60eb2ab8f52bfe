"""Blocks of memory, and the pool that hands them out by best fit and takes dead ones back.

`arena.Arena` and `host_arena.HostArena` are pools. They differ in what their memory is, and so in
how it grows: in place, or by segments that CUDA knows.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import posix
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.disk.extents import FreeRanges


@dataclass(eq=False)
class Segment:
    """A mapping, and the offset of its first byte in a pool.

    array: its bytes, in a view that does not keep them alive. number: its registration with CUDA;
    None if it is not registered. Only a pool and its blocks refer to a segment: it dies with the
    last of them.
    """

    mapping: Mapping
    nbytes: int
    array: np.ndarray[tuple[int], np.dtype[np.uint8]]
    number: int | None = None
    start: int = 0

    @classmethod
    def of(cls, mapping: Mapping, nbytes: int, number: int | None = None) -> Segment:
        return cls(mapping, nbytes, np.frombuffer(mapping.view(0, nbytes), np.uint8), number)


class OwnedBytes(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array whose finalizer frees its block (views of plain arrays would not keep it alive)."""


@dataclass(eq=False)
class MemoryBlock:
    """A block of `nbytes` at `address`, held as long as this or any view or tensor over it lives.

    pinned: True if it is registered with CUDA. padded_nbytes: rounded up to the requested
    alignment; all of it belongs to the block, and the bytes after `nbytes` are undefined.
    """

    nbytes: int
    address: int
    padded_nbytes: int
    pinned: bool
    _array: OwnedBytes | None = field(repr=False)

    @classmethod
    def of(cls, nbytes: int, padded: int, segment: Segment, at: int) -> MemoryBlock:
        within = at - segment.start
        array = segment.array[within : within + padded].view(OwnedBytes)
        address = segment.mapping.address + within
        return cls(nbytes, address, padded, segment.number is not None, array)

    @property
    def tensor(self) -> torch.Tensor:
        """A flat uint8 CPU tensor of exactly `nbytes`; its storage keeps the memory alive."""
        return torch.from_numpy(self.array[: self.nbytes])

    @property
    def view(self) -> memoryview:
        """All `padded_nbytes`, for direct I/O."""
        return self.array.data

    def free(self) -> None:
        """Drop the memory: it is reused once no tensor or view over it is left."""
        self._array = None

    @property
    def array(self) -> OwnedBytes:
        """All `padded_nbytes`; as long as it lives, the block is not handed out again."""
        array = self._array
        if array is None:
            raise OffloadError(
                f"a host block of {self.nbytes} bytes was used after free(): take another one"
            )
        return array


class BlockPool:
    """Hands out blocks of free ranges, all of them multiples of `grain_bytes`. Thread-safe.

    capacity_bytes: total size of the ranges. used_bytes, peak_bytes: bytes handed out, and their
    maximum. While a thread holds `_growing` and grows the pool, others allocate from what it has.
    """

    def __init__(self, grain_bytes: int) -> None:
        self._grain_bytes = grain_bytes
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._free = FreeRanges()
        # filled by the finalizers of blocks, which may run at any line here, even with the lock
        # held (garbage collection): they only append, which needs no lock
        self._returned: deque[tuple[int, int]] = deque()
        self._capacity_bytes = self._used_bytes = self._peak_bytes = 0
        posix.watch(self)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

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
            self._peak_bytes = self._held_bytes()

    # -- with the lock held ------------------------------------------------------------------------

    def _add(self, start: int, nbytes: int) -> None:
        """Add a range, free."""
        self._free.add(start, nbytes)
        self._capacity_bytes += nbytes

    def _settle(self) -> None:
        """Reclaim dead blocks."""
        while self._returned:
            at, padded = self._returned.popleft()
            self._used_bytes -= padded
            self._free.add(at, padded)

    def _carve(self, padded: int, align: int) -> int | None:
        """Take `padded` from the smallest free range that fits; returns its offset, or None."""
        if align == self._grain_bytes:
            # every free range is aligned to it
            at = self._free.take_best(padded)
        else:
            fitting = [
                (size, start)
                for start, size in self._free.ranges()
                if round_up(start, align) + padded <= start + size
            ]
            if not fitting:
                return None
            at = self._free.take_next(round_up(min(fitting)[1], align), padded)
        if at is not None:
            self._used_bytes += padded
            self._note_peak()
        return at

    def _held_bytes(self) -> int:
        """The bytes that the peak counts."""
        return self._used_bytes

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._held_bytes())

    # ----------------------------------------------------------------------------------------------

    def _block(self, nbytes: int, padded: int, segment: Segment, at: int) -> MemoryBlock:
        """The block at an offset that `_carve` returned."""
        block = MemoryBlock.of(nbytes, padded, segment, at)
        note = weakref.finalize(block.array, _give_back, segment, self._returned, at, padded)
        note.atexit = False
        return block

    def before_fork(self) -> None:
        self._growing.acquire()
        self._lock.acquire()

    def after_fork(self, in_child: bool) -> None:
        self._lock.release()
        self._growing.release()


def round_up(nbytes: int, multiple: int) -> int:
    return -(-nbytes // multiple) * multiple


def _give_back(segment: Segment, returned: deque[tuple[int, int]], at: int, padded: int) -> None:
    # holding `segment` here keeps it mapped and registered as long as one of its blocks lives
    returned.append((at, padded))
