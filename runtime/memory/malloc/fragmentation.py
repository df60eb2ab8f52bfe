"""Simulates a heap of limited size that returns pages to the system and faults them in again.

Freed blocks leave holes between others. When blocks and holes together fill the room, the pages of
all holes are returned at once, and a block allocated there later touches new pages: a plan that
leaves little room pays for that in time. This plays a step through such a heap: best fit, adjacent
holes merge, and blocks lose splinters if the allocator keeps them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

#: the first step starts with an empty heap; later ones are alike
STEPS = 3
#: pages are counted in grains of at least this size, with at most this many in the room
_LEAST_GRAIN_BYTES, _MOST_GRAINS = 64 << 10, 8192


class HeldBlock(Protocol):
    """`nbytes` held from position `first` to position `last` of an order, inclusive."""

    @property
    def nbytes(self) -> int: ...
    @property
    def first(self) -> int: ...
    @property
    def last(self) -> int: ...


@dataclass(frozen=True)
class HeapLimit:
    """`nbytes` that blocks and holes may fill; pages are returned `margin_bytes` before that.

    With None there is no limit, and no page is returned.

    splinter_bytes: bytes of each block that stay unusable until its neighbours are freed too.
    mapped_bytes: blocks of at least this size that fit no hole get fresh pages each time; None: no
    block does.
    """

    nbytes: int | None
    margin_bytes: int = 0
    splinter_bytes: int = 0
    mapped_bytes: int | None = None

    def smaller(self, by_bytes: int) -> HeapLimit:
        return self if self.nbytes is None else replace(self, nbytes=max(0, self.nbytes - by_bytes))


@dataclass(frozen=True)
class Returns:
    """The bytes of newly touched pages in one step, and how often pages were returned."""

    touched_bytes: int
    trims: int

    @property
    def touched_mib(self) -> float:
        return self.touched_bytes / 2**20


def returns_of(blocks: Sequence[HeldBlock], room: HeapLimit) -> Returns:
    """Returns the steady-state figures of repeating a step."""
    begins: dict[int, list[int]] = {}
    ends: dict[int, list[int]] = {}
    for i, block in enumerate(blocks):
        if block.nbytes:
            begins.setdefault(block.first, []).append(i)
            ends.setdefault(block.last, []).append(i)
    span_bytes = sum(block.nbytes for block in blocks) if room.nbytes is None else room.nbytes
    heap = _Heap(room, span_bytes)
    for _ in range(STEPS):
        heap.touched_bytes = heap.trims = heap.left_bytes = 0
        for position in sorted({*begins, *ends}):
            for i in begins.get(position, ()):
                heap.take(i, blocks[i].nbytes)
            for i in ends.get(position, ()):
                heap.give(i)
    return Returns(heap.touched_bytes, heap.trims)


class _Heap:
    def __init__(self, room: HeapLimit, span_bytes: int) -> None:
        self.room = room
        self.grain = max(_LEAST_GRAIN_BYTES, span_bytes // _MOST_GRAINS)
        self.touched_bytes = self.trims = self.left_bytes = 0
        self._by_size: list[tuple[int, int]] = []  # holes: (length, begin)
        self._ends: dict[int, int] = {}  # holes: begin → end
        self._begins: dict[int, int] = {}
        self._top = 0
        self._pages: set[int] = set()
        self._blocks: dict[int, tuple[int, int]] = {}
        self._mapped: dict[int, int] = {}

    def take(self, block: int, nbytes: int) -> None:
        place = nbytes + self.room.splinter_bytes
        at = bisect_left(self._by_size, (place, 0))
        mapped = self.room.mapped_bytes
        if at < len(self._by_size):
            begin = self._by_size[at][1]
            end = self._remove(begin)
            if begin + place < end:
                self._add(begin + place, end)
        elif mapped is not None and nbytes >= mapped:
            self._mapped[block] = nbytes
            self.touched_bytes += nbytes
            self._check()
            return
        else:
            begin = self._top
            self._top += place
        self._blocks[block] = begin, begin + nbytes
        fresh = set(self._grains(begin, begin + nbytes)) - self._pages
        self._pages |= fresh
        self.touched_bytes += len(fresh) * self.grain
        self._check()

    def give(self, block: int) -> None:
        if self._mapped.pop(block, None) is not None:
            return
        begin, end = self._blocks.pop(block)
        lost = self.room.splinter_bytes
        if begin - lost in self._begins:
            begin = self._begins[begin - lost]
            self._remove(begin)
        if end + lost in self._ends:
            end = self._remove(end + lost)
        if end + lost == self._top:
            self._top = begin
        else:
            self._add(begin, end)

    def _add(self, begin: int, end: int) -> None:
        self._ends[begin], self._begins[end] = end, begin
        insort(self._by_size, (end - begin, begin))

    def _remove(self, begin: int) -> int:
        end = self._ends.pop(begin)
        del self._begins[end]
        del self._by_size[bisect_left(self._by_size, (end - begin, begin))]
        return end

    def _grains(self, begin: int, end: int) -> range:
        return range(begin // self.grain, (end - 1) // self.grain + 1)

    @property
    def _held_bytes(self) -> int:
        return len(self._pages) * self.grain + sum(self._mapped.values())

    def _check(self) -> None:
        """Trims like `heap.Heap`, which does not if little was touched since the last trim."""
        room, margin = self.room.nbytes, self.room.margin_bytes
        if room is None or self._held_bytes <= max(room - margin, self.left_bytes + margin):
            return
        self._pages = {g for b, e in self._blocks.values() for g in self._grains(b, e)}
        self.trims += 1
        self.left_bytes = self._held_bytes
