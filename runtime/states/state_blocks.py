"""How a parameter's states are cut into blocks, and the bounded memory that blocks pass through."""

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
from offcompile.runtime.disk.spill import Extent

#: of one block: with two fp32 parts, 4 MiB each
BLOCK_BYTES = 8 << 20
LEAST_BLOCK_BYTES = PAGE_BYTES * 8
#: ranges start at multiples of it, so that every part of a full block is whole pages
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
    """Frames of a few sizes, together at most `limit_bytes` unless more is asked for. No lock.

    The limit sinks to what there is when the operating system refuses more.
    """

    def __init__(self, block_bytes: int, limit_bytes: int) -> None:
        self._block_bytes = block_bytes
        self.limit_bytes = limit_bytes
        self.nbytes = self.peak_bytes = 0
        # the one that was given back last is taken last: memory of sizes out of use goes first
        self._free: deque[Frame] = deque()

    def size_for(self, nbytes: int) -> int:
        """Sizes halve from that of a block: what is free serves the next one all the same."""
        size = self._block_bytes
        while size // 2 >= nbytes and size // 2 >= LEAST_BLOCK_BYTES:
            size //= 2
        return page_multiple(size)

    def take(self, nbytes: int, beyond_limit: bool = False) -> Frame | None:
        """One that holds `nbytes`; None: there is no room within the limit."""
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
            # the system gives no more: those that there are have to do
            self.limit_bytes = self.nbytes
            return None
        self.nbytes += size
        self.peak_bytes = max(self.peak_bytes, self.nbytes)
        return frame

    def has_room(self, nbytes: int) -> bool:
        """Whether `take` would find one within the limit."""
        free_bytes = sum(frame.nbytes for frame in self._free)
        return self.nbytes - free_bytes + self.size_for(nbytes) <= self.limit_bytes

    def give_back(self, frame: Frame) -> None:
        if self.nbytes > self.limit_bytes:
            self.nbytes -= frame.nbytes
        else:
            self._free.append(frame)

    def clear(self) -> None:
        """Let go of what is free; what is out goes with its users."""
        self._free.clear()
        self.nbytes = 0


@dataclass(eq=False)
class Block:
    """Elements [start, stop) of one parameter, all parts side by side in one extent."""

    start: int
    stop: int
    dtypes: tuple[torch.dtype, ...]
    extent: Extent
    phase: Phase = Phase.ABSENT
    frame: Frame | None = None
    #: visits that have it, and that wait for it
    pins: int = 0
    waiting: int = 0
    is_dirty: bool = False
    #: the disk has had all of it at least once
    is_written: bool = False
    is_removed: bool = False
    #: in which it was visited last
    step: int = -1
    error: BaseException | None = None

    @property
    def nbytes(self) -> int:
        """What is moved, in whole pages."""
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
    """Ranges of about equal length, a block each; all but the last are multiples of GRAIN."""
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
