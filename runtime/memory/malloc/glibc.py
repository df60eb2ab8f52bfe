"""glibc's malloc: its settings, its figures, the addresses of its heap, and its freed memory."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import threading
import time
from dataclasses import dataclass

# malloc.h of glibc
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, M_MMAP_MAX = 1, -1, -2, -3, -4
USUAL_MMAP_MAX = 65536
_MADV_HUGEPAGE = 14  # mman.h of Linux
_HUGE_PAGE_BYTES = 2 << 20
#: blocks at least this large get a mapping of their own, which is unmapped when they are freed
RETURNED_BYTES = 1 << 20
#: glibc's largest mmap threshold; larger blocks have mappings of their own
KEPT_BYTES = 32 << 20
#: mallopt's trim threshold (a C int) for never returning the end of the heap
NEVER = -1
#: minimum growth of the heap; untouched pages cost nothing
GROWTH_BYTES, USUAL_GROWTH_BYTES = 64 << 20, 128 << 10
#: least size of the block that keeps a reserved range from being the heap's end, and the limit on
#: tries
_PLUG_BYTES, _MOST_PLUGS = 256 << 10, 24


@dataclass(frozen=True)
class Allocator:
    """The process's malloc; `returns_freed` if it now returns large freed blocks at once."""

    name: str
    returns_freed: bool


def return_freed_memory() -> Allocator:
    """Make malloc return freed blocks of 1 MiB and more to the system; returns which malloc it is.

    glibc raises its mmap threshold with every large block that is freed, up to 32 MiB, and keeps
    smaller blocks: a program that offloads its tensors may then hold more memory than one that
    does not. This call returns the memory kept so far, and makes later blocks go back when they
    are freed, at the price of page faults on first touch of every large block. Other allocators
    are left as they are.
    """
    process = ctypes.CDLL(None)
    for symbol, name in (
        ("mallctl", "jemalloc"),
        ("tc_version", "tcmalloc"),
        ("mi_version", "mimalloc"),
    ):
        if hasattr(process, symbol):
            return Allocator(name, returns_freed=False)
    if not hasattr(process, "gnu_get_libc_version"):
        return Allocator(f"the allocator of {sys.platform}", returns_freed=False)
    version = process.gnu_get_libc_version
    version.restype = ctypes.c_char_p
    done = process.mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES) == 1
    process.malloc_trim(0)
    return Allocator(f"glibc {version().decode()}", returns_freed=done)


def glibc_version() -> tuple[int, int] | None:
    """Returns (major, minor), or None for another C library."""
    try:
        name = os.confstr("CS_GNU_LIBC_VERSION")
    except (ValueError, OSError):
        return None
    found = re.match(r"glibc (\d+)\.(\d+)", name or "")
    return (int(found[1]), int(found[2])) if found else None


class _Info(ctypes.Structure):
    """struct mallinfo2"""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


class Malloc:
    """glibc's malloc of this process; `process`: its C library."""

    def __init__(self, process: ctypes.CDLL) -> None:
        self._process = process
        #: number of times that free memory was returned to the system, and the time spent on that
        self.trims = self.trim_ns = 0
        self._huge_from = self._huge_until = 0
        self._laid_out_bytes = 0

    @classmethod
    def of_this_process(cls) -> Malloc | None:
        """None if the process has another allocator, or one that is too old."""
        process = ctypes.CDLL(None)
        if not all(hasattr(process, f) for f in ("mallinfo2", "malloc_trim", "mallopt")):
            return None
        process.mallinfo2.restype = _Info
        process.sbrk.restype = process.malloc.restype = process.realloc.restype = ctypes.c_void_p
        process.malloc.argtypes = (ctypes.c_size_t,)
        process.realloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        process.free.argtypes = (ctypes.c_void_p,)
        process.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        return cls(process)

    # -- settings ----------------------------------------------------------------------------------

    def keep_freed(self) -> None:
        """Keep freed blocks until the next trim, in a heap that grows in large steps."""
        self._process.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
        self._process.mallopt(_M_TRIM_THRESHOLD, NEVER)
        self._process.mallopt(_M_TOP_PAD, GROWTH_BYTES)
        self._process.mallopt(_M_MXFAST, 0)  # small free blocks merge with large ones
        if not self._huge_from:
            self._huge_from = self._huge_until = _start_of_heap()
        self.use_huge_pages()

    def grow_as_usual(self) -> None:
        self._process.mallopt(_M_TOP_PAD, USUAL_GROWTH_BYTES)
        self._process.mallopt(_M_TRIM_THRESHOLD, USUAL_GROWTH_BYTES)

    def map_large_blocks(self, mapped: bool) -> None:
        """Let blocks above `KEPT_BYTES` have mappings of their own, as usual, or not."""
        self._process.mallopt(M_MMAP_MAX, USUAL_MMAP_MAX if mapped else 0)

    # -- figures -----------------------------------------------------------------------------------

    def live_bytes(self) -> int:
        """Returns the bytes that malloc has handed out and that were not freed."""
        info = self._process.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def end(self) -> int:
        """Returns the address at which the heap ends."""
        return self._process.sbrk(0) or 0

    # -- memory ------------------------------------------------------------------------------------

    def trim(self) -> None:
        """Return the pages of all free blocks to the system."""
        began_ns = time.perf_counter_ns()
        self._process.malloc_trim(0)
        self.trims += 1
        self.trim_ns += time.perf_counter_ns() - began_ns
        # the returned end of the heap lost its huge pages
        self._huge_until = min(self._huge_until, self.end())

    def lay_out(self, nbytes: int) -> None:
        """Reserve addresses for a step, and request huge pages before any is touched.

        Memory that the heap gains during a step would be touched in small pages before huge ones
        can be requested, and the heap's end loses them with every trim. So the heap grows once, by
        a free block with a small one after it, so that it is not the end. Addresses alone cost
        nothing.
        """
        if nbytes <= self._laid_out_bytes or not _may_overcommit():
            return
        if threading.current_thread() is not threading.main_thread():
            return  # other threads have heaps of their own
        process = self._process
        self._laid_out_bytes = nbytes
        self.map_large_blocks(False)
        blocks = [process.malloc(nbytes)]
        # the first plug that fits into no hole lies behind the range; each plug in a hole touches a
        # huge page that may have gone back to the system, so the next one is twice as large
        plug_bytes = _PLUG_BYTES
        while blocks[-1] is not None and len(blocks) < _MOST_PLUGS:
            blocks.append(process.malloc(plug_bytes))
            if (blocks[-1] or 0) > (blocks[0] or 0):
                # never freed; cut short, as all of it counts as handed out
                process.realloc(blocks.pop(), _PLUG_BYTES)
                break
            plug_bytes *= 2
        for block in blocks:
            process.free(block)
        self.map_large_blocks(True)
        self.use_huge_pages()

    def use_huge_pages(self) -> None:
        """Request huge pages for new parts of the heap; a system without them may refuse."""
        end = self.end() // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if self._huge_from and end > self._huge_until:
            self._process.madvise(self._huge_from, end - self._huge_from, _MADV_HUGEPAGE)
            self._huge_until = end


def _may_overcommit() -> bool:
    """True if untouched addresses cost nothing."""
    try:
        with open("/proc/sys/vm/overcommit_memory") as file:
            return file.read().strip() != "2"
    except OSError:
        return False


def _start_of_heap() -> int:
    """Returns the address of the first huge page in malloc's own heap; 0 if there is no heap."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                begin = int(line.partition("-")[0], 16)
                return -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    return 0
