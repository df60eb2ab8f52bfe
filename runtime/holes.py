"""The pages of free blocks in malloc's heap, given back some at a time and in whole huge pages.

`malloc_trim` gives back all there are, and by small pages: most are soon needed again, and where
it took a part of a huge page they come back one fault for 4 KiB. Here free blocks are taken from
malloc like any others, their pages dropped, and the blocks freed, so that whoever allocates
meanwhile is never in the way. The end of the heap goes first: malloc uses it last.
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np

HUGE_PAGE_BYTES = 2 << 20
_PAGE_BYTES = 4096
_MADV_DONTNEED = 4
#: blocks asked for, largest first
_SIZES = tuple(mib << 20 for mib in (32, 16, 8, 4))
#: the largest that malloc never maps on its own
_BLOCK_BYTES = 31 << 20
_LOOKED_AT_BYTES = 64 << 20
#: what malloc keeps between its blocks and around the end
_HEADER_BYTES, _END_BYTES = 64, 256 << 10
#: one is used up for each block looked at; too large for malloc's caches of small blocks
_SEEDS, _SEED_BYTES = 128, 2000


class Holes:
    """Those of the heap that begins at `start` (the arena that malloc keeps at the program's end).

    A block that is enlarged comes from the arena that it is from, whichever thread asks: so the
    thread that allocates tensors leaves small blocks here (`stock`), and any thread can use them.
    """

    def __init__(self, process: Any, start: int) -> None:
        self._start = start
        self._realloc, self._malloc = process.realloc, process.malloc
        self._free, self._mincore = process.free, process.mincore
        self._madvise, self._sbrk, self._info = process.madvise, process.sbrk, process.mallinfo2
        self._realloc.restype = self._malloc.restype = ctypes.c_void_p
        self._realloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._malloc.argtypes = (ctypes.c_size_t,)
        self._free.argtypes, self._free.restype = (ctypes.c_void_p,), None
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._seeds: list[int] = []
        self._pages = np.empty(_LOOKED_AT_BYTES // _PAGE_BYTES, np.uint8)
        self._lock = threading.Lock()
        self._grown_bytes = 0

    def stock(self) -> None:
        """To be called by the thread that allocates tensors, now and then."""
        for _ in range(_SEEDS - len(self._seeds)):
            if seed := self._malloc(_SEED_BYTES):
                self._seeds.append(seed)

    def grow(self, nbytes: int) -> None:
        """Have addresses for so much at the end of the heap; no memory is taken."""
        more = nbytes - self._grown_bytes
        if more <= 0:
            return
        self._grown_bytes = nbytes
        blocks = [self._malloc(_BLOCK_BYTES) for _ in range(-(-more // _BLOCK_BYTES))]
        for block in reversed(blocks):
            self._free(block)

    def give_back(self, wanted_bytes: int) -> int:
        """Bytes of RAM that went back: about `wanted_bytes`, or less where there is no more."""
        with self._lock:
            given = self._end()
            held: list[int] = []
            for size in _SIZES:
                while given < wanted_bytes:
                    block = self._hole(size)
                    if block is None:
                        break
                    held.append(block)
                    given += self._drop(block, size)
            for block in held:
                self._free(block)
        return given

    def _end(self) -> int:
        """Drop what lies behind the last block."""
        size = self._info().keepcost - _END_BYTES
        block = self._taken(size) if size >= HUGE_PAGE_BYTES else None
        if block is None:
            return 0
        given = self._drop(block, size)
        self._free(block)
        return given

    def _hole(self, size: int) -> int | None:
        """A free block of that size before the end of the heap."""
        left = self._info().keepcost
        # without that much at the end, malloc would add to it
        if left < size + _END_BYTES:
            return None
        end = (self._sbrk(0) or 0) - left
        block = self._taken(size)
        if block is not None and not self._start <= block <= end - size:
            self._free(block)
            return None
        return block

    def _taken(self, size: int) -> int | None:
        if not self._seeds:
            return None
        seed = self._seeds.pop()
        block: int | None = self._realloc(seed, size)
        if block is None:
            self._seeds.append(seed)
        return block

    def _drop(self, block: int, size: int) -> int:
        begin = -(-(block + _HEADER_BYTES) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        end = (block + size) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        given = 0
        for at in range(begin, end, _LOOKED_AT_BYTES):
            part = min(_LOOKED_AT_BYTES, end - at)
            if self._mincore(at, part, self._pages.ctypes.data):
                continue
            there = int(np.count_nonzero(self._pages[: part // _PAGE_BYTES] & 1))
            if there and not self._madvise(at, part, _MADV_DONTNEED):
                given += there * _PAGE_BYTES
        return given
