"""Manages malloc's memory for the CPU target: freed blocks are kept while the budget allows.

A step allocates and frees large blocks all the time. Returning each to the system would cost page
faults on the next one (some 5% of a step); keeping all of them causes fragmentation that a program
which offloads its tensors cannot afford. So blocks are kept, and once the process's footprint
reaches the budget, the pages of all free blocks are returned at once: by torch's allocator if it
checks the limit itself (`tensor_memory.py`), before it hands out a tensor that would exceed the
limit; by a thread that checks every few milliseconds for any other allocation, and if that
allocator is not available. Under a limit on address space (RLIMIT_DATA, RLIMIT_AS) holes count even
without pages: there each large block is returned at once, and trimming only returns pages that the
heap had before the limit.

Returned memory must be faulted in again, so the heap asks for huge pages: one fault then maps 2 MiB
instead of 4 KiB.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from offcompile.runtime.base.process_memory import return_freed_memory

# malloc.h of glibc
_M_MXFAST, _M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = 1, -1, -2, -3, -4
_USUAL_MMAP_MAX = 65536
_MADV_HUGEPAGE = 14  # mman.h of Linux
_HUGE_PAGE_BYTES = 2 << 20
#: glibc's largest mmap threshold; larger blocks have mappings of their own
KEPT_BYTES = 32 << 20
#: mallopt's trim threshold (a C int) for never returning the end of the heap
NEVER = -1
#: minimum growth of the heap; untouched pages cost nothing
GROWTH_BYTES, USUAL_GROWTH_BYTES = 64 << 20, 128 << 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: size of the block that keeps a reserved range from being the heap's end, and the limit on tries
_PLUG_BYTES, _MOST_HOLES = 256 << 10, 4096
#: upper bound on the rate at which a process touches new pages
FASTEST_BYTES_PER_S = 4e9
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1
#: distance below the limit at which pages are returned if no allocator checks before the touch
MARGIN_BYTES = 4 << 20


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


#: number of steps that begin by measuring the process's memory outside of blocks: garbage left by
#: compilation is gone by the second
_MEASUREMENTS = 2


class Guard(Protocol):
    """An allocator that returns the pages of free blocks before it hands out a block that would
    take the process beyond a limit."""

    def limit(self, nbytes: int | None, statm: int) -> None:
        """Set the limit, None for none. `statm`: descriptor of this process's /proc/self/statm."""
        ...

    def trims(self) -> int: ...

    def trim_ns(self) -> int: ...


def address_space_is_limited() -> bool:
    """True if a limit counts memory once it is mapped, and not only once it has pages."""
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(which)[0] != resource.RLIM_INFINITY for which in limits)


class Heap:
    """Keeps glibc's malloc within a budget; leaves other allocators alone."""

    def __init__(self, guard: Guard | None = None) -> None:
        process = ctypes.CDLL(None)
        known = all(hasattr(process, f) for f in ("mallinfo2", "malloc_trim", "mallopt"))
        self._process = process if known and os.path.exists("/proc/self/statm") else None
        if self._process is not None:
            process.mallinfo2.restype = _Info
            process.sbrk.restype = process.malloc.restype = ctypes.c_void_p
            process.malloc.argtypes = (ctypes.c_size_t,)
            process.free.argtypes = (ctypes.c_void_p,)
            process.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        self.pid = os.getpid()
        #: the process's memory outside of blocks, and how many steps are still to measure it
        self._other_bytes, self._to_measure = 0, _MEASUREMENTS
        self._limit_bytes: int | None = None
        self._left_bytes = 0
        self._budget_bytes = 0
        #: True once freed blocks stay with the process until the heap is trimmed
        self.keeps = False
        #: largest part of a step's budget seen in use
        self.peak_bytes = 0
        self._huge_from = self._huge_until = 0
        self._laid_out_bytes = 0
        #: bytes of that peak in holes between blocks
        self.waste_bytes = 0
        self._trims = self._trim_ns = 0
        self.guard = guard
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def trims(self) -> int:
        """Number of times that free memory was returned to the system."""
        return self._trims + (0 if self.guard is None else self.guard.trims())

    @property
    def trim_ns(self) -> int:
        """Time spent on trims."""
        return self._trim_ns + (0 if self.guard is None else self.guard.trim_ns())

    @property
    def fits_again(self) -> bool:
        """True if the block of a freed tensor fits the next tensor of its size."""
        return self.guard is not None

    @property
    def gives_back(self) -> bool:
        """True if this malloc can return its free blocks to the system."""
        return self._process is not None

    def prepare(self) -> None:
        """Configure the handling of freed blocks; call it before a step that offloads."""
        if self._process is None or address_space_is_limited():
            return_freed_memory()
            if self._process is not None:  # a limit would count growth ahead of need
                self._process.mallopt(_M_TOP_PAD, USUAL_GROWTH_BYTES)
                self._process.mallopt(_M_TRIM_THRESHOLD, USUAL_GROWTH_BYTES)
                self.trim()
            self._limit(None)
        else:
            self.keeps = True
            self._process.mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES)
            self._process.mallopt(_M_TRIM_THRESHOLD, NEVER)
            self._process.mallopt(_M_TOP_PAD, GROWTH_BYTES)
            self._process.mallopt(_M_MXFAST, 0)  # small free blocks merge with large ones
            if not self._huge_from:
                self._huge_from = self._huge_until = _start_of_heap()
            self._use_huge_pages()

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Allocates blocks above KEPT_BYTES from the heap, too, as in a step whose budget was
        reserved beforehand; trims the heap afterwards if it grew.

        Without `fits_again`, each block could find the place of the last one too short, and the
        heap could grow without bound: such blocks then keep mappings of their own as usual.
        """
        process = self._process
        if process is None or address_space_is_limited() or not self.fits_again:
            yield
            return
        before = self.resident_bytes()
        process.mallopt(_M_MMAP_MAX, 0)
        try:
            yield
        finally:
            process.mallopt(_M_MMAP_MAX, _USUAL_MMAP_MAX)
            if self.resident_bytes() > before + KEPT_BYTES // 2:
                self.trim()

    def settle(self) -> None:
        """Measure the process's memory outside of blocks again at the next steps.

        The old figure stays until then, because the watching thread may be using it.
        """
        self._to_measure = _MEASUREMENTS

    def begin(
        self,
        planned_bytes: int,
        budget_bytes: int,
        at_rest: Callable[[], None] = lambda: None,
        lays_out: bool = True,
    ) -> None:
        """Begin a step, with `planned_bytes` of its budget allocated already.

        at_rest: waits until no block is still to be filled, and its pages touched, by a lane.
        lays_out: reserve addresses for the budget, for a step that will use all of it.
        """
        if self._process is None:
            return
        if lays_out and not address_space_is_limited():
            self._lay_out(budget_bytes)
        if self._to_measure:
            self._to_measure -= 1
            at_rest()
            self.trim()
            self._other_bytes = self.resident_bytes() - self.live_bytes()
        live = self.live_bytes()
        self._left_bytes = 0
        self._budget_bytes = budget_bytes
        self._limit(live + self._other_bytes + budget_bytes - planned_bytes)
        if self._thread is None:
            thread = threading.Thread(target=self._watch, name="offcompile-heap", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no address space left for a stack
                if not address_space_is_limited():
                    raise
                self._limit(None)  # freed blocks are returned at once
                return
            self._thread = thread
        self._changed.set()

    def end(self) -> None:
        """End the step: its budget no longer applies."""
        self.check()
        self._limit(None)

    def _limit(self, nbytes: int | None) -> None:
        self._limit_bytes = nbytes
        if self.guard is not None:
            self.guard.limit(nbytes, self._statm)

    def check(self) -> float:
        """Trim the heap if the process is about to exceed the budget.

        Returns the bytes left until the next trim; infinity if there is no limit.
        """
        limit = self._limit_bytes
        if limit is None or os.getpid() != self.pid:
            return float("inf")
        held = self.resident_bytes()
        of_budget = self._budget_bytes - (limit - held)
        if of_budget > self.peak_bytes:
            self.peak_bytes = of_budget
            self.waste_bytes = self._hole_bytes(held)
        # if the footprint has grown little since the last trim, there is little to return
        margin = MARGIN_BYTES if self.guard is None else 0
        worth = max(limit - margin, self._left_bytes + MARGIN_BYTES)
        if held <= worth:
            return worth - held
        self.trim()
        self._left_bytes = left = self.resident_bytes()
        # memory that trimming cannot return does not belong to the step: do not try it again
        if left > limit and self._limit_bytes == limit:
            self._other_bytes += left - limit
            self._limit(left)
        return 0.0

    def _lay_out(self, nbytes: int) -> None:
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
        assert process is not None
        self._laid_out_bytes = nbytes
        process.mallopt(_M_MMAP_MAX, 0)
        blocks = [process.malloc(nbytes)]
        # the first plug that fits into no hole lies behind the range
        while blocks[-1] is not None and len(blocks) < _MOST_HOLES:
            blocks.append(process.malloc(_PLUG_BYTES))
            if (blocks[-1] or 0) > (blocks[0] or 0):
                blocks.pop()  # the plug is never freed
                break
        for block in blocks:
            process.free(block)
        process.mallopt(_M_MMAP_MAX, _USUAL_MMAP_MAX)
        self._use_huge_pages()

    def _use_huge_pages(self) -> None:
        """Request huge pages for new parts of the heap; a system without them may refuse."""
        assert self._process is not None
        end = (self._process.sbrk(0) or 0) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
        if self._huge_from and end > self._huge_until:
            self._process.madvise(self._huge_from, end - self._huge_from, _MADV_HUGEPAGE)
            self._huge_until = end

    def _watch(self) -> None:
        while True:
            self._changed.wait()
            self._use_huge_pages()
            room = self.check()
            if room == float("inf"):
                self._changed.clear()
                if self._limit_bytes is not None:  # set again meanwhile
                    self._changed.set()
                continue
            time.sleep(min(max(room / FASTEST_BYTES_PER_S, SHORTEST_LOOK_S), LONGEST_LOOK_S))

    def trim(self) -> None:
        if self._process is not None:
            began_ns = time.perf_counter_ns()
            self._process.malloc_trim(0)
            self._trims += 1
            self._trim_ns += time.perf_counter_ns() - began_ns
            # the returned end of the heap lost its huge pages
            self._huge_until = min(self._huge_until, self._process.sbrk(0) or 0)

    def _hole_bytes(self, held_bytes: int) -> int:
        """Resident bytes outside of blocks; untouched pages of blocks make it an underestimate."""
        return max(held_bytes - self._other_bytes - self.live_bytes(), 0)

    def live_bytes(self) -> int:
        """Returns the bytes that malloc has handed out and that were not freed."""
        assert self._process is not None
        info = self._process.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def resident_bytes(self) -> int:
        """Returns the resident bytes of the process without shared pages."""
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES


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


_lock = threading.Lock()
# per process, as malloc is
_heap: Heap | None = None


def guard_with(guard: Guard) -> None:
    """Let torch's allocator check the limit, too, from now on."""
    heap().guard = guard


def heap() -> Heap:
    """Returns the process's only heap."""
    global _heap
    with _lock:
        # a forked child has inherited its parent's figures, but no thread
        if _heap is None or _heap.pid != os.getpid():
            _heap = Heap(None if _heap is None else _heap.guard)
        return _heap
