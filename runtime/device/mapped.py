"""Host memory of the CPU target that ops can use in place: mapped files.

Tensors here take no anonymous memory of the process: their pages belong to the page cache, which
the system keeps while it has room and drops when it has none. Copies to and from the files use
reads and writes, so they touch no page of the mapping and never wait for a page fault.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base import interrupts
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.disk.directories import check_directory, free_bytes
from offcompile.runtime.disk.page_cache import (
    free_range,
    read_scattered,
    resident_pages,
    zero_range,
)
from offcompile.runtime.disk.spill_file import open_unlinked
from offcompile.runtime.memory.range_allocator import RangeAllocator

from .interface import Slot
from .owners import address_of
from .tickets import telling

#: Files grow with the bytes in use, so that their number (each holds descriptors) stays below a few
#: hundred whatever the number of tensors.
LEAST_FILE_BYTES, USUAL_FILE_BYTES, FILE_SHARE = 1 << 20, 64 << 20, 8
#: Write zeros if more than this fraction of the pages is resident: 128 MiB take 3 ms then, and 90
#: ms if pages must be read first. The file system zeroes nonresident pages in 0.1 ms; resident ones
#: take it 35 ms, plus 50 ms as pages are faulted back in.
RESIDENT_SHARE = 0.5


def check_room(directory: Path, nbytes: int) -> None:
    """Raise OffloadError if a file of this size cannot be made in the directory."""
    check_directory(directory)
    if free_bytes(directory) < nbytes:
        raise OffloadError(
            f"{nbytes} bytes are needed in {directory} for what stays outside of the device, and"
            f" {free_bytes(directory)} are free there: free space, or name another directory"
            ' with options={"spill": "/path"}'
        )


class MappedSlot(Slot):
    """The space of one tensor within a mapped file, which lives as long as any of its slots."""

    __slots__ = ("_file", "nbytes", "offset", "scattered", "tier")
    #: True if the store that knows the slot has made its file
    is_own = True
    #: True if other tensors may get the space when this one has died; else the system gets it
    is_reused = True

    def __init__(self, file: MappedFile, offset: int, nbytes: int, tier: str) -> None:
        self._file = file
        self.offset, self.nbytes, self.tier = offset, nbytes, tier
        self.scattered = False

    @property
    def where(self) -> str:
        return str(self._file.directory)

    def __del__(self) -> None:
        # this may be a finalizer: no lock
        if self.is_reused:
            self._file.given_back.append((self.offset, page_multiple(max(self.nbytes, 1))))

    def array(self) -> np.ndarray[tuple[int], np.dtype[np.generic]]:
        """The memory itself, as an array that keeps the file alive."""
        return np.frombuffer(self._file.memory, np.uint8, self.nbytes, self.offset)

    def free(self) -> None:
        """Does nothing: the space is released with the tensor on it."""

    def give_up(self) -> None:
        """Give the space back to the system: the tensor on it is dead."""
        self._file.free(self.offset, max(self.nbytes, 1))

    def clear_absent(self) -> bool:
        """Zero the slot if most of it is not resident; returns False if it was left unchanged."""
        found = resident_pages(self.array().ctypes.data, self.nbytes)
        if found is None or found * PAGE_BYTES > RESIDENT_SHARE * self.nbytes:
            return False
        return self._file.clear(self.offset, self.nbytes)

    def expect_scattered(self, scattered: bool) -> bool:
        """Turn readahead off for scattered access, or on again (the default)."""
        if scattered == self.scattered:
            return False
        self.scattered = scattered
        read_scattered(self._file.memory, self.offset, self.nbytes, scattered)
        return True

    def read(self, start: int, view: memoryview) -> None:
        """Fill `view` with the tensor's bytes from `start` on."""
        self._file.transfer(os.preadv, self.offset + start, view)

    def write(self, start: int, view: memoryview) -> None:
        self._file.transfer(os.pwritev, self.offset + start, view)


class MappedFile:
    """One unlinked file, mapped as a whole; the mapping and the descriptor share its pages."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.directory = directory
        #: (offset, bytes) of slots that died
        self.given_back: deque[tuple[int, int]] = deque()
        size = max(PAGE_BYTES, page_multiple(nbytes))
        check_room(directory, size)
        self._descriptor = open_unlinked(directory)
        try:
            # allocate now: touching a mapping without disk space behind it kills the process
            os.posix_fallocate(self._descriptor, 0, size)
            self.memory = mmap.mmap(self._descriptor, size)
        except OSError as error:
            os.close(self._descriptor)
            raise OffloadError(
                f"a file of {size} bytes in {directory} cannot be mapped ({error.strerror}): free"
                ' space there, or name another directory with options={"spill": "/path"}'
            ) from error

    def transfer(
        self, call: Callable[[int, Sequence[memoryview], int], int], at: int, view: memoryview
    ) -> None:
        done = 0
        while done < len(view):
            try:
                moved = call(self._descriptor, [view[done:]], at + done)
            except OSError as error:
                raise self._failed(at + done, error.strerror or str(error)) from error
            if not moved:
                raise self._failed(at + done, "nothing was moved")
            done += moved

    def clear(self, offset: int, nbytes: int) -> bool:
        """Zero whole pages without touching them; False if the file system cannot."""
        return zero_range(self._descriptor, offset, nbytes)

    def free(self, offset: int, nbytes: int) -> None:
        """Give whole pages back to the file system. They must not be used again."""
        free_range(self._descriptor, offset, nbytes)

    def _failed(self, at: int, why: str) -> OffloadError:
        return OffloadError(
            f"the file of weights and gradients in {self.directory} failed at byte {at} ({why}):"
            ' check that disk, or name another directory with options={"spill": "/path"}'
        )

    def __del__(self) -> None:
        descriptor = getattr(self, "_descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


class MappedStore:
    """Creates slots that ops can use in place, and finds them by their addresses.

    Space of a tensor that died is cached for the next one of its size (gradients recur with every
    step), up to the bytes in use or the bytes that `keep_room` asks for, whichever is more.
    """

    def __init__(self, directory: Path, tier: str = "host") -> None:
        self.directory, self.tier = directory, tier
        self.used_bytes = self.spare_bytes = 0
        self._kept_for: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._slots: dict[int, MappedSlot] = {}
        self._spare: dict[int, list[MappedSlot]] = {}  # by size
        self._dead: deque[int] = deque()
        self._rooms = RangeAllocator(partial(MappedFile, directory))

    @interrupts.uninterrupted
    def tensors(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Flat uint8 tensors of these sizes; new ones lie one after another in one file.

        They are uninitialized. `slot_of` finds each, and every tensor that shares its storage, for
        as long as it lives.
        """
        with self._lock:
            self._sweep()
            found = [self._take(nbytes) for nbytes in sizes]
            missing = [n for n, slot in zip(sizes, found, strict=True) if slot is None]
            new = iter(self._new(missing) if missing else ())
            return [self._made(slot or next(new)) for slot in found]

    def _take(self, nbytes: int) -> MappedSlot | None:
        spare = self._spare.get(nbytes)
        if not spare:
            return None
        self.spare_bytes -= nbytes
        return spare.pop()

    def _new(self, sizes: Sequence[int]) -> list[MappedSlot]:
        offsets, end = [], 0
        for nbytes in sizes:
            offsets.append(end)
            end += page_multiple(max(nbytes, 1))
        file, start = self._rooms.take(end, self._ahead(end))
        pairs = zip(offsets, sizes, strict=True)
        return [MappedSlot(file, start + offset, nbytes, self.tier) for offset, nbytes in pairs]

    def _ahead(self, nbytes: int) -> int:
        """The size of a new file made for `nbytes`, with room for tensors that may follow."""
        if not self.used_bytes:
            return nbytes
        usual = min(max(self.used_bytes, LEAST_FILE_BYTES), USUAL_FILE_BYTES)
        ahead = page_multiple(max(nbytes, usual, self.used_bytes // FILE_SHARE))
        # on a nearly full disk, allocate only the bytes needed
        return ahead if free_bytes(self.directory) >= 2 * ahead else nbytes

    def _made(self, slot: MappedSlot) -> torch.Tensor:
        array = slot.array()
        address = array.ctypes.data
        # runs inside a finalizer: no lock, and nothing that could be interrupted
        tensor = telling(array, partial(self._dead.append, address))
        self._slots[address] = slot
        if slot.is_own:
            self.used_bytes += slot.nbytes
        return tensor

    def is_free(self, slot: MappedSlot) -> bool:
        """True if no tensor lies on this slot."""
        with self._lock:
            self._sweep()
            return slot.array().ctypes.data not in self._slots

    @interrupts.uninterrupted
    def tensor_on(self, slot: MappedSlot) -> torch.Tensor:
        """A flat uint8 tensor on a free slot of a file from elsewhere."""
        with self._lock:
            self._sweep()
            return self._made(slot)

    def keep_room(self, owner: object, nbytes: int) -> None:
        """Cache this many bytes of freed space for reuse, as long as `owner` lives."""
        with self._lock:
            self._kept_for[owner] = nbytes

    def slot_of(self, tensor: torch.Tensor) -> MappedSlot | None:
        """The slot that holds the tensor's storage."""
        address = address_of(tensor)
        with self._lock:
            if self._dead:
                self._sweep()
            return None if address is None else self._slots.get(address)

    @interrupts.uninterrupted
    def _sweep(self) -> None:
        while self._dead:
            slot = self._slots.pop(self._dead.popleft())
            slot.expect_scattered(False)
            slot.forget()
            if not slot.is_own:
                continue
            self.used_bytes -= slot.nbytes
            if not slot.is_reused:
                slot.give_up()
                continue
            self.spare_bytes += slot.nbytes
            self._spare.setdefault(slot.nbytes, []).append(slot)
        kept_bytes = max(self.used_bytes, sum(self._kept_for.values()))
        while self.spare_bytes > kept_bytes:
            size = max(size for size, slots in self._spare.items() if slots)
            self._spare[size].pop()
            self.spare_bytes -= size
