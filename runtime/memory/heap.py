"""The CPU target's memory is malloc's: what is freed is kept for reuse while the budget allows.

A step frees and takes large blocks all the time. Giving each back to the system would cost a first
touch for the next one (some 5% of a step); keeping all of them lets holes pile up that a program
which moves its tensors out cannot afford. So blocks are kept, and when what the process holds
reaches what the budget allows, the pages of free blocks are given back in one go: by torch's
allocator where it looks at the limit itself (`tensor_memory.py`), before a tensor is touched that
would exceed it; by a thread that looks every few milliseconds for whatever else takes memory, and
where that allocator is not to be had. Under a limit on address space (RLIMIT_DATA, RLIMIT_AS) holes
count even without pages: there each large block is returned at once, and pages are given back only
of what the heap had grown to before the limit.

What was given back has to be touched again, so the heap asks for huge pages: one fault then brings
2 MiB instead of 4 KiB.
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
#: the most that glibc lets blocks of its heap be; larger ones have mappings of their own
KEPT_BYTES = 32 << 20
#: as mallopt's trim threshold: never give the end of the heap back (what it takes is a C int)
NEVER = -1
#: how much the heap grows by at least; untouched pages cost nothing
GROWTH_BYTES, USUAL_GROWTH_BYTES = 64 << 20, 128 << 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: what keeps a laid out range from being the heap's end, and how many holes are tried for it
_PLUG_BYTES, _MOST_HOLES = 256 << 10, 4096
#: no process touches new pages faster than this
FASTEST_BYTES_PER_S = 4e9
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1
#: how far below the limit pages are given back where nobody looks before they are touched
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


#: so many steps begin with measuring what the process holds beside its blocks: what compiling
#: leaves to be collected is gone by the second
_MEASUREMENTS = 2


class Guard(Protocol):
    """An allocator that gives the pages of free blocks back before it hands out one that would take
    the process beyond a limit."""

    def limit(self, nbytes: int | None, statm: int) -> None:
        """None: no limit. `statm`: an open file, the /proc/self/statm of this process."""
        ...

    def trims(self) -> int: ...

    def trim_ns(self) -> int: ...


def address_space_is_limited() -> bool:
    """Whether memory counts when it is mapped, and not only once it has pages."""
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(which)[0] != resource.RLIM_INFINITY for which in limits)


class Heap:
    """glibc's malloc, kept within what a budget allows; other allocators are left alone."""

    def __init__(self) -> None:
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
        #: what the process holds beside its blocks, and whether that is to be measured again
        self._other_bytes, self._to_measure = 0, _MEASUREMENTS
        self._limit_bytes: int | None = None
        self._left_bytes = 0
        self._budget_bytes = 0
        #: True once freed blocks stay with the process until somebody trims
        self.keeps = False
        #: most of a step's budget that was seen to be held
        self.peak_bytes = 0
        self._huge_from = self._huge_until = 0
        self._laid_out_bytes = 0
        #: of what was held then, pages in holes between blocks
        self.waste_bytes = 0
        self._trims = self._trim_ns = 0
        self.guard = _guard
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def trims(self) -> int:
        """How often free blocks were given back."""
        return self._trims + (0 if self.guard is None else self.guard.trims())

    @property
    def trim_ns(self) -> int:
        """What that took."""
        return self._trim_ns + (0 if self.guard is None else self.guard.trim_ns())

    @property
    def fits_again(self) -> bool:
        """Whether a freed tensor's place fits the next one of its size."""
        return self.guard is not None

    @property
    def gives_back(self) -> bool:
        """Whether this malloc is one whose free blocks can go back to the system."""
        return self._process is not None

    def prepare(self) -> None:
        """Choose how freed blocks are dealt with; call it before a step that moves tensors."""
        if self._process is None or address_space_is_limited():
            return_freed_memory()
            if self._process is not None:  # growth ahead of need would count
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
        """Inside, blocks above KEPT_BYTES come from the heap and go back to it, too, as in a step
        whose budget was laid out beforehand; afterwards it gives back what it grew by.

        Without blocks that fit again each one could find the last one's place too short, and the
        heap grow beyond all bounds: then they have mappings of their own as ever.
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
        """Measure anew, at the next steps, what the process holds beside its blocks.

        Until then the old figure stays: the watching thread may be using it.
        """
        self._to_measure = _MEASUREMENTS

    def begin(
        self,
        planned_bytes: int,
        budget_bytes: int,
        at_rest: Callable[[], None] = lambda: None,
        lays_out: bool = True,
    ) -> None:
        """A step begins: of its budget, `planned_bytes` stand already.

        at_rest: returns when no block waits any more for a lane to fill it, and to touch its pages.
        lays_out: have addresses for the budget ready, as a step wants that will use all of it.
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
            except RuntimeError:  # no address left for a stack
                if not address_space_is_limited():
                    raise
                self._limit(None)  # what is freed goes back at once
                return
            self._thread = thread
        self._changed.set()

    def end(self) -> None:
        """The step is over: what is held now is no matter of its budget."""
        self.check()
        self._limit(None)

    def _limit(self, nbytes: int | None) -> None:
        self._limit_bytes = nbytes
        if self.guard is not None:
            self.guard.limit(nbytes, self._statm)

    def check(self) -> float:
        """Give free blocks back if the process is about to hold more than the budget allows.

        Returns how many bytes are left until then; infinity where there is no limit.
        """
        limit = self._limit_bytes
        if limit is None or os.getpid() != self.pid:
            return float("inf")
        held = self.resident_bytes()
        of_budget = self._budget_bytes - (limit - held)
        if of_budget > self.peak_bytes:
            self.peak_bytes = of_budget
            self.waste_bytes = self._hole_bytes(held)
        # when little has come since the last time, there is little to take again
        margin = MARGIN_BYTES if self.guard is None else 0
        worth = max(limit - margin, self._left_bytes + MARGIN_BYTES)
        if held <= worth:
            return worth - held
        self.trim()
        self._left_bytes = left = self.resident_bytes()
        # what trimming cannot take is none of the step's: do not try for it again
        if left > limit and self._limit_bytes == limit:
            self._other_bytes += left - limit
            self._limit(left)
        return 0.0

    def _lay_out(self, nbytes: int) -> None:
        """Have addresses for a step ready, in huge pages before anything is touched.

        What a heap grows by during a step would be touched in small pages before anybody can ask
        for huge ones, and its end loses them with every trim. So it grows once, by a free block
        that a small one behind it keeps from being the end. Addresses alone cost nothing.
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
        # the first that does not fit into a hole lies behind it
        while blocks[-1] is not None and len(blocks) < _MOST_HOLES:
            blocks.append(process.malloc(_PLUG_BYTES))
            if (blocks[-1] or 0) > (blocks[0] or 0):
                blocks.pop()  # never freed
                break
        for block in blocks:
            process.free(block)
        process.mallopt(_M_MMAP_MAX, _USUAL_MMAP_MAX)
        self._use_huge_pages()

    def _use_huge_pages(self) -> None:
        """Ask for them where the heap has grown; a system without them may refuse."""
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
            # the end of the heap went with its huge pages
            self._huge_until = min(self._huge_until, self._process.sbrk(0) or 0)

    def _hole_bytes(self, held_bytes: int) -> int:
        """What is held and in no block; what a block has not touched yet hides as much of it."""
        return max(held_bytes - self._other_bytes - self.live_bytes(), 0)

    def live_bytes(self) -> int:
        """What malloc has handed out and not got back."""
        assert self._process is not None
        info = self._process.mallinfo2()
        return int(info.uordblks + info.hblkhd)

    def resident_bytes(self) -> int:
        """Pages of the process's own."""
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES


def _may_overcommit() -> bool:
    """Whether addresses that nobody touches are free."""
    try:
        with open("/proc/sys/vm/overcommit_memory") as file:
            return file.read().strip() != "2"
    except OSError:
        return False


def _start_of_heap() -> int:
    """The first huge page within malloc's own heap; 0 when there is none."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                begin = int(line.partition("-")[0], 16)
                return -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    return 0


_lock = threading.Lock()
_heap: Heap | None = None
_guard: Guard | None = None


def guard_with(guard: Guard) -> None:
    """From now on torch's allocator looks at the limit, too."""
    global _guard
    _guard = guard
    heap().guard = guard


def heap() -> Heap:
    """The process's one heap."""
    global _heap
    with _lock:
        # a forked child has another process's figures, and no thread
        if _heap is None or _heap.pid != os.getpid():
            _heap = Heap()
        return _heap
