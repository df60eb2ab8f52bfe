"""Manages malloc's memory for the CPU target: freed blocks are kept while the budget allows.

A step allocates and frees large blocks all the time. Returning each to the system would cost page
faults on the next one (some 5% of a step). Keeping all of them causes fragmentation that a program
which offloads its tensors cannot afford. So blocks are kept, and once the process's footprint
reaches the budget, the pages of free blocks are returned: of those with places (`places.py`) no
more than have to go, and of malloc's all at once. Our allocator for torch does that before it hands
out a tensor that would exceed the limit (`tensor_memory.py`). For any other allocation, and where
that allocator is not available, a thread does it that checks every few milliseconds. Under a limit
on address space (RLIMIT_DATA, RLIMIT_AS) holes count even without pages: there each large block is
returned at once, and trimming only returns pages that the heap had before the limit.

Returned memory must be faulted in again, so the heap asks for huge pages: one fault then maps 2 MiB
instead of 4 KiB.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from offcompile.runtime.base.posix import resource

from .glibc import KEPT_BYTES, Malloc, return_freed_memory
from .places import BlockPlaces

_STATM = "/proc/self/statm"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
#: upper bound on the rate at which a process touches new pages
FASTEST_BYTES_PER_S = 4e9
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.002, 0.1
#: distance below the limit at which pages are returned if no allocator checks before the touch
MARGIN_BYTES = 4 << 20


#: number of steps that begin by measuring the process's memory outside of blocks: garbage left by
#: compilation is gone by the second
_MEASUREMENTS = 2


class Guard(Protocol):
    """An allocator that returns the pages of free blocks before it hands out a block that would
    take the process beyond a limit. It can also give blocks places outside of malloc's heap."""

    places: BlockPlaces

    def limit(self, nbytes: int | None, statm: int) -> None:
        """Set the limit, None for none. `statm`: descriptor of this process's /proc/self/statm."""
        ...

    def keep_within(self, most_bytes: int) -> None:
        """Return pages until the process holds no more than that: of free places no more than have
        to go, since each comes back when a block is placed there."""
        ...

    def trims(self) -> int: ...

    def trim_ns(self) -> int: ...

    def placed_bytes(self) -> int:
        """Bytes of blocks that lie outside of malloc's heap."""
        ...

    def count(self) -> None:
        """Count the bytes that this thread allocates from now on, less those that it frees."""
        ...

    def most_counted(self) -> int:
        """The most that this came to."""
        ...

    def give_back_places(self) -> None:
        """Return the pages of free places outside of malloc's heap."""
        ...

    def watch(self, limit_bytes: int, beyond_bytes: int, seconds: float) -> int:
        """Look as often as `Heap` would, in native code, for at most `seconds`: until the process
        holds more than `beyond_bytes`, or the limit is no longer `limit_bytes`, or the heap has
        another end. Returns the most bytes seen, 0 if it did not look."""
        ...


def address_space_is_limited() -> bool:
    """True if a limit counts memory once it is mapped, and not only once it has pages."""
    limits = (resource.RLIMIT_DATA, resource.RLIMIT_AS)
    return any(resource.getrlimit(which)[0] != resource.RLIM_INFINITY for which in limits)


class Heap:
    """Keeps glibc's malloc within a budget; leaves other allocators alone."""

    def __init__(self, guard: Guard | None = None) -> None:
        self._malloc = Malloc.of_this_process() if os.path.exists(_STATM) else None
        self._statm = -1 if self._malloc is None else os.open(_STATM, os.O_RDONLY | os.O_CLOEXEC)
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
        #: bytes of that peak in holes between blocks
        self.waste_bytes = 0
        self.guard = guard
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def trims(self) -> int:
        """Number of times that free memory was returned to the system."""
        own = 0 if self._malloc is None else self._malloc.trims
        return own + (0 if self.guard is None else self.guard.trims())

    @property
    def trim_ns(self) -> int:
        """Time spent on trims."""
        own = 0 if self._malloc is None else self._malloc.trim_ns
        return own + (0 if self.guard is None else self.guard.trim_ns())

    @property
    def fits_again(self) -> bool:
        """True if the block of a freed tensor fits the next tensor of its size."""
        return self.guard is not None

    @property
    def gives_back(self) -> bool:
        """True if this malloc can return its free blocks to the system."""
        return self._malloc is not None

    def prepare(self) -> None:
        """Configure the handling of freed blocks; call it before a step that offloads."""
        if self._malloc is None or address_space_is_limited():
            return_freed_memory()
            if self._malloc is not None:  # a limit would count growth ahead of need
                self._malloc.grow_as_usual()
                self.trim()
            self._limit(None)
        else:
            self.keeps = True
            self._malloc.keep_freed()

    @contextmanager
    def laid_out(self) -> Iterator[None]:
        """Allocates blocks above KEPT_BYTES from the heap, too, as in a step whose budget was
        reserved beforehand; trims the heap afterwards if it grew.

        Without `fits_again`, each block could find the place of the last one too short, and the
        heap could grow without bound: such blocks then keep mappings of their own as usual.
        """
        malloc = self._malloc
        if malloc is None or address_space_is_limited() or not self.fits_again:
            yield
            return
        before = self.resident_bytes()
        malloc.map_large_blocks(False)
        try:
            yield
        finally:
            malloc.map_large_blocks(True)
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
        if self._malloc is None:
            return
        if lays_out and not address_space_is_limited():
            self._malloc.lay_out(budget_bytes)
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
        self._note(held, self._budget_bytes - limit)
        # if the footprint has grown little since the last trim, there is little to return
        margin = MARGIN_BYTES if self.guard is None else 0
        worth = max(limit - margin, self._left_bytes + MARGIN_BYTES)
        if held <= worth:
            return worth - held
        if self.guard is None:
            self.trim()
        else:
            self.guard.keep_within(limit)
        self._left_bytes = left = self.resident_bytes()
        # trimming again would not help. Tensors over the budget concern this step only; what else
        # cannot be returned does not belong to any step
        if left > limit and self._limit_bytes == limit:
            tensors_over = max(self.live_bytes() + self._other_bytes - limit, 0)
            self._other_bytes += max(left - limit - tensors_over, 0)
            self._limit(left)
        return 0.0

    def _note(self, held_bytes: int, of_budget_bytes: int) -> None:
        """Note what the process holds; `of_budget_bytes` more of it count against the budget."""
        if held_bytes + of_budget_bytes > self.peak_bytes:
            self.peak_bytes = held_bytes + of_budget_bytes
            self.waste_bytes = self._hole_bytes(held_bytes)

    def _watch(self) -> None:
        assert self._malloc is not None
        while True:
            self._changed.wait()
            self._malloc.use_huge_pages()
            limit, budget_bytes = self._limit_bytes, self._budget_bytes
            room = self.check()
            if room == float("inf") or limit is None:
                self._changed.clear()
                if self._limit_bytes is not None:  # set again meanwhile
                    self._changed.set()
            elif self.guard is None:
                time.sleep(min(max(room / FASTEST_BYTES_PER_S, SHORTEST_LOOK_S), LONGEST_LOOK_S))
            else:
                # from Python, a look every 2 ms takes 2% of a core
                beyond_bytes = self.resident_bytes() + int(room)
                most_bytes = self.guard.watch(limit, beyond_bytes, LONGEST_LOOK_S)
                self._note(most_bytes, budget_bytes - limit)

    def trim(self) -> None:
        if self._malloc is not None:
            self._malloc.trim()
            if self.guard is not None:
                self.guard.give_back_places()

    def _hole_bytes(self, held_bytes: int) -> int:
        """Resident bytes outside of blocks; untouched pages of blocks make it an underestimate."""
        return max(held_bytes - self._other_bytes - self.live_bytes(), 0)

    def live_bytes(self) -> int:
        """Returns the bytes that were handed out and not freed."""
        assert self._malloc is not None
        placed_bytes = 0 if self.guard is None else self.guard.placed_bytes()
        return self._malloc.live_bytes() + placed_bytes

    def resident_bytes(self) -> int:
        """Returns the resident bytes of the process without shared pages."""
        _, resident, shared, *_ = os.pread(self._statm, 128, 0).split()
        return (int(resident) - int(shared)) * _PAGE_BYTES


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
