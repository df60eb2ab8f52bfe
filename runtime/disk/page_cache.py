"""Queries and controls which pages of a mapped file are in memory."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple

_ZERO_RANGE, _KEEP_SIZE = 0x10, 0x01
_libc = ctypes.CDLL(None, use_errno=True)


def resident_pages(address: int, nbytes: int) -> int | None:
    """Returns how many pages from the page-aligned `address` are in memory; None if unknown."""
    count = page_multiple(nbytes) // PAGE_BYTES
    states = np.zeros(count, np.uint8)
    call = getattr(_libc, "mincore", None)
    where = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    if call is None or call(*where, ctypes.c_void_p(states.ctypes.data)):
        return None
    return int((states & 1).sum())


def zero_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Zero whole pages of a file without writing, keeping its space; False if not supported."""
    call = getattr(_libc, "fallocate64", None)
    if call is None:
        return False
    where = ctypes.c_int64(offset), ctypes.c_int64(page_multiple(nbytes))
    return bool(call(descriptor, _ZERO_RANGE | _KEEP_SIZE, *where) == 0)


def read_scattered(memory: mmap.mmap, offset: int, nbytes: int, scattered: bool) -> None:
    """Read a touched page alone if `scattered`, or with read-ahead (the default)."""
    if hasattr(mmap, "MADV_RANDOM"):
        advice = mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL
        memory.madvise(advice, offset, page_multiple(nbytes))
