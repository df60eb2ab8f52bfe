"""Manages free ranges of an arena or a file: sorted, merged, allocated by best fit or as a log.

There are no locks here: the owner of the ranges holds the lock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right


class FreeRanges:
    """Disjoint free ranges [start, end), no two of them touching."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def ranges(self) -> list[tuple[int, int]]:
        """Returns (start, size) of every free range, in order."""
        return [(s, e - s) for s, e in zip(self._starts, self._ends, strict=True)]

    def largest(self) -> int:
        return max((e - s for s, e in zip(self._starts, self._ends, strict=True)), default=0)

    def add(self, start: int, size: int) -> None:
        """Free [start, start + size), merging it with its neighbours; freeing twice is an error."""
        if size <= 0 or start < 0:
            raise ValueError(f"[{start}, {start + size}) is not a range")
        end = start + size
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        merged_start, merged_end = start, end
        for i in range(first, last):
            if self._starts[i] < end and self._ends[i] > start:
                raise ValueError(f"[{start}, {end}) is free already")
            merged_start = min(merged_start, self._starts[i])
            merged_end = max(merged_end, self._ends[i])
        self._starts[first:last] = [merged_start]
        self._ends[first:last] = [merged_end]
        self._total += size

    def take_best(self, size: int) -> int | None:
        """Take `size` from the smallest range that fits, the lowest of equals; returns its start,
        or None if none fits."""
        best: int | None = None
        best_size = 0
        for i, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size and (best is None or end - start < best_size):
                best, best_size = i, end - start
        return None if best is None else self._carve(best, self._starts[best], size)

    def take_next(self, head: int, size: int) -> int | None:
        """Take `size` at `head`, else from the first range after it that fits, else from the first
        of all; returns its start, or None if none fits."""
        under = bisect_right(self._starts, head) - 1
        if under >= 0 and self._ends[under] - head >= size:
            return self._carve(under, head, size)
        count = len(self._starts)
        for i in [*range(under + 1, count), *range(under + 1)]:
            if self._ends[i] - self._starts[i] >= size:
                return self._carve(i, self._starts[i], size)
        return None

    def take_largest(self, limit: int) -> tuple[int, int] | None:
        """Take the largest range, cut to `limit`; returns (start, size), None if there is none."""
        size = min(self.largest(), limit)
        if size <= 0:
            return None
        start = self.take_best(size)
        return None if start is None else (start, size)

    def _carve(self, i: int, start: int, size: int) -> int:
        if size <= 0:
            raise ValueError(f"asked for {size}")
        left, right = self._starts[i], self._ends[i]
        kept = [(s, e) for s, e in ((left, start), (start + size, right)) if s < e]
        self._starts[i : i + 1] = [s for s, _ in kept]
        self._ends[i : i + 1] = [e for _, e in kept]
        self._total -= size
        return start
