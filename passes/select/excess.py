"""The bytes over the limit in each cell, and how many of them an eviction would free."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from offcompile.passes.build.gaps import MOST_CELLS, Gap


def excess(held: Sequence[float], limit: Sequence[float]) -> Excess:
    """Returns the excess in the form that is fastest for this many cells."""
    # sums by block and by cell are equal to the last digit only if no limit divides a byte
    blocked = len(held) > MOST_CELLS and all(x % 1 == 0 for x in limit)
    return BlockedExcess(held, limit) if blocked else Excess(held, limit)


class Excess:
    """The bytes over the limit in each cell, which evictions lower."""

    def __init__(self, held: Sequence[float], limit: Sequence[float]) -> None:
        self.limit = limit
        self.left = [max(0, h - x) for h, x in zip(held, limit, strict=True)]
        over = self.cells()
        #: no cell is over before the first of these, or from the second on
        self.low, self.high = (over[0], over[-1] + 1) if over else (0, 0)
        self._sums: dict[int, list[float]] = {}
        self._survey(((0, len(held)),))

    @property
    def some(self) -> bool:
        return self.low < self.high

    def cells(self) -> list[int]:
        return [j for j, left in enumerate(self.left) if left]

    def freed(self, gap: Gap) -> float:
        """Returns the excess bytes that an eviction would remove, summed over its cells."""
        size, freed, left = gap.tensor.nbytes, 0.0, self.left
        low, high, most = self.low, self.high, self.most
        for a, b in gap.cells:  # the innermost loop of a search
            part = left[a if a > low else low : b if b < high else high]
            if size < most:
                part = [x if x < size else size for x in part]
            freed = sum(part, freed)
        return freed

    def freed_first(self, gap: Gap) -> float:
        """Returns the same as `freed` before anything has been lowered, faster.

        Many gaps have few distinct sizes: for each size, the sums over all cells serve all of its
        gaps.
        """
        size, cells = gap.tensor.nbytes, gap.cells
        sums = self._sums.get(size)
        if sums is None:
            each = [left if left < size else size for left in self.left]
            sums = self._sums[size] = list(accumulate(each, initial=0.0))
        if not cells:
            return 0.0
        if len(cells) == 1:
            first, end = cells[0]
            return sums[end] - sums[first]
        return sum([y - x for a, b in cells for x, y in pairwise(sums[a : b + 1])])

    def lower(self, held: Sequence[float], gap: Gap) -> None:
        """Updates the cells of a gap that has been evicted."""
        left = self.left
        for a, b in gap.cells:
            left[a:b] = self._lowered(a, b, held, gap.tensor.nbytes)
        while self.low < self.high and not left[self.low]:
            self.low += 1
        while self.low < self.high and not left[self.high - 1]:
            self.high -= 1
        self._survey(gap.cells)

    def _lowered(self, a: int, b: int, held: Sequence[float], size: int) -> list[float]:
        """Returns the excess of these cells, from which `size` bytes have been evicted."""
        parts = zip(self.left[a:b], held[a:b], self.limit[a:b], strict=True)
        return [h - x if before and h > x else 0 for before, h, x in parts]

    def _survey(self, changed: Iterable[tuple[int, int]]) -> None:
        """Updates summaries of the cells in these ranges."""
        self.most = max(self.left, default=0)


class BlockedExcess(Excess):
    """The same for many cells, in blocks with known minimum, maximum and sum; bytes are whole."""

    BLOCK = 48

    def __init__(self, held: Sequence[float], limit: Sequence[float]) -> None:
        count = -(-len(held) // self.BLOCK)
        self._blocks: list[tuple[float, float, float]] = [(0, 0, 0)] * count
        super().__init__(held, limit)

    def freed(self, gap: Gap) -> float:
        size, low, high = gap.tensor.nbytes, self.low, self.high
        return sum([self._freed(max(a, low), min(b, high), size) for a, b in gap.cells])

    freed_first = freed

    def _freed(self, low: int, high: int, size: int) -> float:
        first, last = -(-low // self.BLOCK), high // self.BLOCK
        if first >= last:
            return self._within(low, high, size)
        freed = self._within(low, first * self.BLOCK, size)
        freed += self._within(last * self.BLOCK, high, size)
        for b, (least, most, total) in enumerate(self._blocks[first:last], first):
            if most <= size:
                freed += total
            elif least >= size:
                freed += size * self.BLOCK
            else:
                freed += self._within(b * self.BLOCK, (b + 1) * self.BLOCK, size)
        return freed

    def _lowered(self, a: int, b: int, held: Sequence[float], size: int) -> list[float]:
        return [x - size if x > size else 0 for x in self.left[a:b]]

    def _within(self, low: int, high: int, size: int) -> float:
        return sum([x if x < size else size for x in self.left[low:high]])

    def _survey(self, changed: Iterable[tuple[int, int]]) -> None:
        for low, high in changed:
            for b in range(low // self.BLOCK, -(-high // self.BLOCK)):
                block = self.left[b * self.BLOCK : (b + 1) * self.BLOCK]
                self._blocks[b] = min(block), max(block), sum(block)
