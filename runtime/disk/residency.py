"""What of a mapped file is in memory, and how it gets there or goes."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple

_ZERO_RANGE, _KEEP_SIZE = 0x10, 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def resident_pages(address: int, nbytes: int) -> int | None:
    """How many pages from `address`, which begins one, are in memory; None: nobody tells."""
    count = page_multiple(nbytes) // PAGE_BYTES
    states = np.zeros(count, np.uint8)
    call = getattr(_libc, "mincore", None)
    where = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    if call is None or call(*where, ctypes.c_void_p(states.ctypes.data)):
        return None
    return int((states & 1).sum())


def zero_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Make whole pages of a file zero without a write, its space kept; False: cannot be done."""
    call = getattr(_libc, "fallocate64", None)
    if call is None:
        return False
    where = ctypes.c_int64(offset), ctypes.c_int64(page_multiple(nbytes))
    return bool(call(descriptor, _ZERO_RANGE | _KEEP_SIZE, *where) == 0)


def read_scattered(memory: mmap.mmap, offset: int, nbytes: int, scattered: bool) -> None:
    """Have a touched page come alone, or with those that follow it (the usual way)."""
    if hasattr(mmap, "MADV_RANDOM"):
        advice = mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL
        memory.madvise(advice, offset, page_multiple(nbytes))
