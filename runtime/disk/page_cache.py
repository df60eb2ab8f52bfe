"""Queries and controls which pages of a mapped file are in memory."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple

_ZERO_RANGE, _KEEP_SIZE, _PUNCH_HOLE = 0x10, 0x01, 0x02
#: an entry of /proc/PID/pagemap: 8 bytes a page; it is in memory, swapped out, or a file's
_ENTRY_BYTES, _PRESENT, _SWAPPED, _OF_FILE = 8, 1 << 63, 1 << 62, 1 << 61
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


def own_pages(address: int, nbytes: int) -> int | None:
    """Count the pages of a private file mapping, from the page-aligned `address` on, that this
    process has written to, and so has to itself; None if unknown."""
    page = mmap.PAGESIZE
    first, last = address // page, -(-(address + nbytes) // page)
    try:
        descriptor = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        told = os.pread(descriptor, _ENTRY_BYTES * (last - first), _ENTRY_BYTES * first)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    entries = np.frombuffer(told, np.uint64)
    if len(entries) != last - first:
        return None
    there = entries & np.uint64(_PRESENT | _SWAPPED) != 0
    return int((there & (entries & np.uint64(_OF_FILE) == 0)).sum())


def zero_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Zero whole pages of a file without writing, keeping its space; False if not supported."""
    return _allocate(_ZERO_RANGE | _KEEP_SIZE, descriptor, offset, nbytes)


def free_range(descriptor: int, offset: int, nbytes: int) -> bool:
    """Give whole pages of a file back to the file system, which then reads zeros there and may have
    no space to write to them; False if not supported."""
    return _allocate(_PUNCH_HOLE | _KEEP_SIZE, descriptor, offset, nbytes)


def _allocate(how: int, descriptor: int, offset: int, nbytes: int) -> bool:
    call = getattr(_libc, "fallocate64", None)
    if call is None:
        return False
    where = ctypes.c_int64(offset), ctypes.c_int64(page_multiple(nbytes))
    return bool(call(descriptor, how, *where) == 0)


def read_scattered(memory: mmap.mmap, offset: int, nbytes: int, scattered: bool) -> None:
    """Read a touched page alone if `scattered`, or with read-ahead (the default)."""
    if hasattr(mmap, "MADV_RANDOM"):
        advice = mmap.MADV_RANDOM if scattered else mmap.MADV_NORMAL
        memory.madvise(advice, offset, page_multiple(nbytes))
