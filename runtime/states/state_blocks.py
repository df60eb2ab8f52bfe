"""Cuts a parameter's states into blocks, and provides the bounded memory that they pass through."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES, Mapping, page_multiple
from offcompile.runtime.disk.spill_space import Extent

#: size of one block: with two fp32 parts, 4 MiB each
BLOCK_BYTES = 8 << 20
LEAST_BLOCK_BYTES = PAGE_BYTES * 8
#: ranges start at multiples of this, so that every part of a full block is whole pages
GRAIN = PAGE_BYTES


class Phase(Enum):
    ABSENT = "on disk only, or never written"
    READING = "on its way into a frame"
    READY = "in a frame, nobody is moving it"
    LEAVING = "in a frame, to be written"
    WRITING = "in a frame, being written"


class Frame:
    """Page-aligned private memory for one block; it lives as long as any tensor on it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        mapping = Mapping(nbytes)
        mapping.open(0, mapping.nbytes)
        memory = (ctypes.c_uint8 * nbytes).from_address(mapping.address)
        memory.mapping = mapping  # type: ignore[attr-defined]
        with torch.inference_mode(False):
            self.flat = torch.from_numpy(np.frombuffer(memoryview(memory).cast("B"), np.uint8))
        self.view = mapping.view(0, nbytes)


class Frames:
    """Frames of a few sizes, at most `limit_bytes` in total unless a caller exceeds it. No lock.

    The limit drops to the current size when the operating system refuses more memory.
    """

    def __init__(self, block_bytes: int, limit_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.limit_bytes = limit_bytes
        self.nbytes = self.peak_bytes = 0
        # frames are reused and dropped oldest first, so those of unused sizes are dropped first
        self._free: deque[Frame] = deque()

    def size_for(self, nbytes: int) -> int:
        """The frame size for a block: halvings of the block size, so that frames are reusable."""
        size = self._block_bytes
        while size // 2 >= nbytes and size // 2 >= LEAST_BLOCK_BYTES:
            size //= 2
        return page_multiple(size)

    def take(self, nbytes: int, beyond_limit: bool = False) -> Frame | None:
        """A frame that holds `nbytes`; None if there is no room within the limit."""
        size = self.size_for(nbytes)
        for frame in self._free:
            if frame.nbytes == size:
                self._free.remove(frame)
                return frame
        while self._free and self.nbytes + size > self.limit_bytes:
            self.nbytes -= self._free.popleft().nbytes
        if self.nbytes + size > self.limit_bytes and not beyond_limit:
            return None
        try:
            frame = Frame(size)
        except OffloadError:
            if beyond_limit or not self.nbytes:
                raise
            # the system refuses more memory: make do with the existing frames
            self.limit_bytes = self.nbytes
            return None
        self.nbytes += size
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return frame

    def has_room(self, nbytes: int) -> bool:
        """True if `take` would find a frame within the limit."""
        free_bytes = sum(frame.nbytes for frame in self._free)
        return self.nbytes - free_bytes + self.size_for(nbytes) <= self.limit_bytes

    def give_back(self, frame: Frame) -> None:
        if self.nbytes > self.limit_bytes:
            self.nbytes -= frame.nbytes
        else:
            self._free.append(frame)

    def clear(self) -> None:
        """Drop the free frames; frames in use are freed with their users."""
        self._free.clear()
        self.nbytes = 0


@dataclass(eq=False)
class StateBlock:
    """Elements [start, stop) of one parameter, all parts side by side in one extent."""

    start: int
    stop: int
    dtypes: tuple[torch.dtype, ...]
    extent: Extent
    phase: Phase = Phase.ABSENT
    frame: Frame | None = None
    #: numbers of visits that hold it, and that wait for it
    pins: int = 0
    waiting: int = 0
    is_dirty: bool = False
    #: True once all of it has been written to the disk
    is_written: bool = False
    is_removed: bool = False
    #: the step in which it was last visited
    step: int = -1
    error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """Bytes per transfer, in whole pages."""
        return self.extent.padded_nbytes

    def parts(self) -> tuple[torch.Tensor, ...]:
        """Views of its frame, each at the start of a page."""
        assert self.frame is not None
        found, at, count = [], 0, self.stop - self.start
        for dtype in self.dtypes:
            nbytes = count * dtype.itemsize
            found.append(self.frame.flat[at : at + nbytes].view(dtype))
            at += page_multiple(nbytes, PAGE_BYTES)
        return tuple(found)


def padded_bytes(count: int, dtypes: Sequence[torch.dtype]) -> int:
    """Bytes of `count` elements of every part, each part in whole pages."""
    return sum(page_multiple(count * dtype.itemsize, PAGE_BYTES) for dtype in dtypes)


def cut(numel: int, dtypes: Sequence[torch.dtype], block_bytes: int) -> list[tuple[int, int]]:
    """Ranges of about equal length, one per block; all but the last are multiples of GRAIN."""
    width = sum(dtype.itemsize for dtype in dtypes)
    most = block_bytes // width // GRAIN * GRAIN
    if not most:
        raise OffloadError(
            f"block_bytes={block_bytes} is too small for {len(dtypes)} parts of {width} bytes an "
            f"element: give at least {GRAIN * width}"
        )
    count = -(-numel // most)
    length = page_multiple(-(-numel // count), GRAIN)
    return [(start, min(start + length, numel)) for start in range(0, numel, length)]
