"""Allocates ranges within mapped files, so that many small tensors share few files."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from offcompile.runtime.disk.extents import FreeRanges


class RoomFile(Protocol):
    """A file that owners of its ranges keep alive; they append (offset, bytes) when done."""

    given_back: deque[tuple[int, int]]


File = TypeVar("File", bound=RoomFile)


class RangeAllocator(Generic[File]):
    """Hands out ranges of files, and drops a file once its last range is gone.

    Has no lock of its own: the owner holds one.
    """

    def __init__(self, make: Callable[[int], File]) -> None:
        self._make = make
        self._files: list[tuple[weakref.ref[File], FreeRanges]] = []

    def take(self, nbytes: int, file_bytes: int) -> tuple[File, int]:
        """Allocate `nbytes`: (file, offset). A new file has `file_bytes`, at least `nbytes`.

        Returned ranges count as free from the next call on.
        """
        self._files = [(ref, free) for ref, free in self._files if ref() is not None]
        for ref, free in self._files:
            file = ref()
            if file is None:
                continue
            while file.given_back:
                free.add(*file.given_back.popleft())
            start = free.take_best(nbytes)
            if start is not None:
                return file, start
        file = self._make(file_bytes)
        free = FreeRanges()
        if file_bytes > nbytes:
            free.add(nbytes, file_bytes - nbytes)
        self._files.append((weakref.ref(file), free))
        return file, 0
