"""Memory for staging and reload buffers: taken from the system once, touched, and kept.

First touch of fresh memory can be slower than the disk, so buffers live in one persistent mapping.
It is private: a limit on the process's data (RLIMIT_DATA) counts it like any other allocation.
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


class _Owned(np.ndarray[tuple[int], np.dtype[np.uint8]]):
    """An array whose death gives its block back (plain arrays cannot be watched)."""


@dataclass(frozen=True)
class Block:
    """Page-aligned memory, held until this, its views and the storages of its tensors are dead."""

    nbytes: int  # as asked for
    _array: _Owned = field(repr=False)  # whole pages

    @property
    def padded_nbytes(self) -> int:
        """Bytes of the whole pages that hold it."""
        return self._array.nbytes

    @property
    def view(self) -> memoryview:
        """The whole pages, for direct I/O; what lies behind `nbytes` means nothing."""
        return self._array.data

    def tensor(self) -> torch.Tensor:
        """A flat uint8 tensor on exactly `nbytes`; whatever shares its storage keeps the block."""
        return torch.from_numpy(self._array[: self.nbytes])


class Arena:
    """Blocks out of one mapping by best fit; beyond it, mappings of their own. Thread safe.

    capacity_bytes: what the arena itself holds. used_bytes: what of it is handed out.
    overflow_bytes: what is mapped besides, now. peak_bytes: most of both together.
    In a forked child everything is there as it was, as a copy of its own.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise OffloadError(f"an arena of {nbytes} bytes is not possible: give 0 or more")
        self._lock = threading.Lock()
        self._growing = threading.Lock()
        self._free = FreeRanges()
        # filled by dying blocks, which may die inside of any line of ours (garbage collection),
        # the lock taken: they only leave a note here, which needs no lock
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
        """Grow to a capacity of at least `nbytes`, touched; blocks stay where they are."""
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

    def block(self, nbytes: int) -> Block:
        """Memory for `nbytes`; OffloadError when even the system has none left."""
        if nbytes < 0:
            raise OffloadError(f"a block of {nbytes} bytes is not possible: give 0 or more")
        padded = page_multiple(max(nbytes, 1))
        with self._lock:
            used = self._settled()
            start = self._free.take_best(padded)
            if start is not None:
                self._note_peak(used + padded + self._overflow_bytes)
        if start is None:
            return Block(nbytes, self._overflowing(padded))
        array = _owned(self._addresses, start, padded)
        note = weakref.finalize(array, _give_back, self._addresses, self._returned, start, padded)
        note.atexit = False
        return Block(nbytes, array)

    def _overflowing(self, padded: int) -> _Owned:
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
        """Bytes handed out of the arena, after all that has died is given back; under the lock."""
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


def _owned(mapping: Mapping, start: int, padded: int) -> _Owned:
    return np.frombuffer(mapping.view(start, padded), np.uint8).view(_Owned)


def _reserve(nbytes: int) -> Mapping:
    """Addresses for all that this machine could ever hold, so that the arena can grow in place."""
    ample = max(nbytes, machine_memory_bytes())
    try:
        return Mapping(ample)
    except OffloadError:  # addresses themselves are bounded (ulimit -v)
        return Mapping(max(nbytes, 1))


def _give_back(mapping: Mapping, returned: deque[tuple[int, int]], start: int, padded: int) -> None:
    # `mapping` is here to outlive the arena for as long as a block of it lives
    returned.append((start, padded))


def _unmap(mapping: Mapping, unmapped: deque[int], padded: int) -> None:
    mapping.unmap()
    unmapped.append(padded)
