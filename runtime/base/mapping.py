"""Maps private anonymous memory, in whole pages, straight from the operating system."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

from offcompile.ir import OffloadError

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20

#: direct I/O and the arena use 4,096-byte pages; larger hardware pages are multiples of those
_SYSTEM_PAGE_BYTES = max(PAGE_BYTES, mmap.PAGESIZE)
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_TOUCHED_AT_ONCE_BYTES = 64 << 20

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_ssize_t,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


def page_multiple(nbytes: int, page_bytes: int = _SYSTEM_PAGE_BYTES) -> int:
    """`nbytes` rounded up to whole pages."""
    return -(-nbytes // page_bytes) * page_bytes


class Mapping:
    """A range of addresses, at first without memory behind it. A forked child gets a copy.

    It is unmapped when the last reference dies, so code that hands out pointers must hold one.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = page_multiple(nbytes)
        # only ranges aligned to huge pages can use them
        asked = self.nbytes + (HUGE_PAGE_BYTES if self.nbytes >= HUGE_PAGE_BYTES else 0)
        start = _libc.mmap(None, asked, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        if start is None or start == _MAP_FAILED:
            raise _refused(nbytes, "addresses")
        self.address: int = start
        if asked > self.nbytes:
            self.address = page_multiple(start, HUGE_PAGE_BYTES)
            _unmap(start, self.address - start)
            end = self.address + self.nbytes
            _unmap(end, start + asked - end)
        self._unmapped = weakref.finalize(self, _unmap, self.address, self.nbytes)
        # tensors may still lie here at exit, and the system reclaims the memory anyway
        self._unmapped.atexit = False

    def open(self, start: int, nbytes: int) -> None:
        """Back [start, start + nbytes) with memory, charged now and populated on first touch."""
        if _libc.mprotect(self.address + start, nbytes, mmap.PROT_READ | mmap.PROT_WRITE):
            raise _refused(nbytes, "memory")
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # only a hint: kernels without huge pages refuse it and use small ones
            _libc.madvise(self.address + start, nbytes, mmap.MADV_HUGEPAGE)

    def touch(self, start: int, nbytes: int) -> None:
        """Populate every page of a fresh range [start, start + nbytes) before it is needed."""
        for at in range(start, start + nbytes, _TOUCHED_AT_ONCE_BYTES):
            size = min(_TOUCHED_AT_ONCE_BYTES, start + nbytes - at)
            if _libc.madvise(self.address + at, size, _MADV_POPULATE_WRITE):
                ctypes.memset(self.address + at, 0, size)

    def view(self, start: int, nbytes: int) -> memoryview:
        """Returns a view of [start, start + nbytes) that does not keep the mapping alive."""
        return memoryview((ctypes.c_uint8 * nbytes).from_address(self.address + start)).cast("B")

    def keep(self) -> None:
        """Never unmap the range, even once the last reference has died."""
        self._unmapped.detach()

    def unmap(self) -> None:
        """Unmap the range now; no pointers into it may remain."""
        self._unmapped()


def _unmap(address: int, nbytes: int) -> None:
    if nbytes:
        _libc.munmap(address, nbytes)


def _refused(nbytes: int, what: str) -> OffloadError:
    code = ctypes.get_errno()
    return OffloadError(
        f"the operating system refused {nbytes} bytes of {what} ({os.strerror(code)}): lower "
        "`memory`, or raise what bounds this process (ulimit -d, ulimit -v, vm.overcommit_memory)"
    )
