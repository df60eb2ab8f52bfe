"""Memory for staging and reload buffers: allocated from the system once, touched, and kept.

The first touch of fresh memory can be slower than the disk, so buffers live in one persistent
mapping. It is private: RLIMIT_DATA counts it like any other allocation.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import forks
from offcompile.runtime.base.mapping import Mapping, page_multiple
from offcompile.runtime.base.process_memory import machine_memory_bytes
from offcompile.runtime.disk.extents import FreeRanges


class _OwnedBytes(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array whose finalizer frees its block (views of plain arrays would not keep it alive)."""


@dataclass(frozen=True)
class ArenaBlock:
    """Page-aligned memory, held until this, its views and the storages of its tensors are dead."""

    nbytes: int  # as requested
    _array: _OwnedBytes = field(repr=False)  # whole pages

    @property
    def padded_nbytes(self) -> int:
        """Size in whole pages."""
        return self._array.nbytes

    @property
    def view(self) -> memoryview:
        """The whole pages, for direct I/O; the bytes after `nbytes` are undefined."""
        return self._array.data

    def tensor(self) -> torch.Tensor:
        """Returns a flat uint8 tensor of exactly `nbytes`; tensors that share its storage keep the
        block alive."""
        return torch.from_numpy(self._array[: self.nbytes])


class Arena:
    """Allocates blocks by best fit from one mapping; others get mappings of their own. Thread-safe.

    capacity_bytes: size of the arena itself. used_bytes: the part of it handed out.
    overflow_bytes: mapped outside it now. peak_bytes: maximum of used and overflow together.
    A forked child gets its own copy of everything.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise OffloadError(f"an arena of {nbytes} bytes is not possible: give 0 or more")
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._free = FreeRanges()
        # filled by the finalizers of blocks, which may run at any line here, even with the lock
        # held (garbage collection): they only append, which needs no lock
        self._returned: deque[tuple[int, int]] = deque()
        self._unmapped: deque[int] = deque()
        self._capacity_bytes = 0
        self._overflow_bytes = 0
        self._peak_bytes = 0
        self._addresses = _reserve(page_multiple(nbytes))
        self.ensure(nbytes)
        forks.watch(self)

    @property
    def capacity_bytes(self) -> int:
        return self._capacity_bytes

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return self._settled()

    @property
    def overflow_bytes(self) -> int:
        with self._lock:
            self._settled()
            return self._overflow_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Make `peak_bytes` count from now."""
        with self._lock:
            self._peak_bytes = self._settled() + self._overflow_bytes

    def ensure(self, nbytes: int) -> None:
        """Grow to a capacity of at least `nbytes`, touched; blocks do not move."""
        with self._growing:
            start = self._capacity_bytes
            more = page_multiple(nbytes) - start
            if more <= 0:
                return
            if start + more > self._addresses.nbytes:
                raise OffloadError(
                    f"the arena cannot grow to {nbytes} bytes: it has room for "
                    f"{self._addresses.nbytes} (the memory of this machine, or what `ulimit -v` "
                    "left): lower `memory`"
                )
            self._addresses.open(start, more)
            self._addresses.touch(start, more)
            with self._lock:
                self._free.add(start, more)
                self._capacity_bytes += more

    def block(self, nbytes: int) -> ArenaBlock:
        """Allocate `nbytes`; raises OffloadError if even the system has no memory left."""
        if nbytes < 0:
            raise OffloadError(f"a block of {nbytes} bytes is not possible: give 0 or more")
        padded = page_multiple(max(nbytes, 1))
        with self._lock:
            used = self._settled()
            start = self._free.take_best(padded)
            if start is not None:
                self._note_peak(used + padded + self._overflow_bytes)
        if start is None:
            return ArenaBlock(nbytes, self._overflowing(padded))
        array = _owned(self._addresses, start, padded)
        note = weakref.finalize(array, _give_back, self._addresses, self._returned, start, padded)
        note.atexit = False
        return ArenaBlock(nbytes, array)

    def _overflowing(self, padded: int) -> _OwnedBytes:
        own = Mapping(padded)
        own.open(0, padded)
        with self._lock:
            used = self._settled()
            self._overflow_bytes += padded
            self._note_peak(used + self._overflow_bytes)
        array = _owned(own, 0, padded)
        note = weakref.finalize(array, _unmap, own, self._unmapped, padded)
        note.atexit = False
        return array

    def _settled(self) -> int:
        """Reclaim dead blocks, then return the bytes handed out; call it with the lock held."""
        while self._returned:
            self._free.add(*self._returned.popleft())
        while self._unmapped:
            self._overflow_bytes -= self._unmapped.popleft()
        return self._capacity_bytes - self._free.total

    def _note_peak(self, held_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, held_bytes)

    def before_fork(self) -> None:
        self._growing.acquire()
        self._lock.acquire()

    def after_fork(self, in_child: bool) -> None:
        self._lock.release()
        self._growing.release()


def _owned(mapping: Mapping, start: int, padded: int) -> _OwnedBytes:
    return np.frombuffer(mapping.view(start, padded), np.uint8).view(_OwnedBytes)


def _reserve(nbytes: int) -> Mapping:
    """Reserve addresses for all of the machine's memory, so that the arena can grow in place."""
    ample = max(nbytes, machine_memory_bytes())
    try:
        return Mapping(ample)
    except OffloadError:  # address space itself is limited (ulimit -v)
        return Mapping(max(nbytes, 1))


def _give_back(mapping: Mapping, returned: deque[tuple[int, int]], start: int, padded: int) -> None:
    # holding `mapping` here keeps it alive as long as a block lives, even after the arena
    returned.append((start, padded))


def _unmap(mapping: Mapping, unmapped: deque[int], padded: int) -> None:
    mapping.unmap()
    unmapped.append(padded)
