"""Chooses gaps until nothing exceeds capacity: greedy by bytes per lane time, then pruned."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from offcompile.passes.build.gaps import Gap, Gaps


@dataclass(frozen=True)
class Prices:
    """The price of a microsecond in each direction, by how busy the direction is."""

    out: float = 1.0
    back: float = 1.0


class GapSet:
    """The set of gaps in which tensors are evicted, with up-to-date bytes held in every cell."""

    def __init__(self, gaps: Gaps, away: Iterable[int] = ()) -> None:
        self.gaps = gaps
        self.away: set[int] = set(away)
        self.held = gaps.held(self.away)
        self.values: dict[int, int] = {}  # value → number of its evictions
        for i in self.away:
            value = gaps.gaps[i].value
            self.values[value] = self.values.get(value, 0) + 1

    def copy(self) -> GapSet:
        other = GapSet.__new__(GapSet)
        other.gaps, other.away = self.gaps, set(self.away)
        other.held, other.values = list(self.held), dict(self.values)
        return other

    def add(self, index: int) -> None:
        gap = self.gaps.gaps[index]
        self.away.add(index)
        self.values[gap.value] = self.values.get(gap.value, 0) + 1
        held, nbytes = self.held, gap.tensor.nbytes
        for a, b in gap.cells:
            held[a:b] = [x - nbytes for x in held[a:b]]

    def remove(self, index: int) -> None:
        gap = self.gaps.gaps[index]
        self.away.discard(index)
        self.values[gap.value] -= 1
        held, nbytes = self.held, gap.tensor.nbytes
        for a, b in gap.cells:
            held[a:b] = [x + nbytes for x in held[a:b]]

    def cost(self, gap: Gap, prices: Prices) -> float:
        """Returns the lane time that a gap adds; evictions of one value share its write-back."""
        others = self.values.get(gap.value, 0) - (gap.index in self.away)
        out = gap.out_us if gap.dirty and not others else 0.0
        return out * prices.out + gap.in_us * prices.back + 1e-9

    def traffic_us(self) -> float:
        paid: set[int] = set()
        total = 0.0
        for i in sorted(self.away):
            gap = self.gaps.gaps[i]
            total += gap.in_us
            if gap.dirty and gap.value not in paid:
                paid.add(gap.value)
                total += gap.out_us
        return total

    def fits(self, index: int, capacity: float) -> bool:
        """True if the tensor could stay on the device in this gap after all."""
        gap = self.gaps.gaps[index]
        room = capacity - gap.tensor.nbytes
        return all(max(self.held[a:b]) <= room for a, b in gap.cells)

    def repair(
        self,
        capacity: float | Sequence[float],
        prices: Prices,
        weight: Callable[[Gap], float] = lambda gap: 1.0,
        forbidden: frozenset[int] = frozenset(),
    ) -> bool:
        """Evicts in gaps, best bytes per lane time first, until every run fits."""
        limit = [capacity] * len(self.held) if isinstance(capacity, (int, float)) else capacity
        gaps = self.gaps.gaps
        # lazy greedy: a gap's profit only falls as others are chosen, so a stale top is re-priced;
        # with very many gaps, one nearly as good as the best will do
        near = 1.0 if len(gaps) < 500 else 0.85
        over = _Over(self.held, limit)
        seen = set(self.gaps.over(over.cells())) - self.away - forbidden
        heap = [
            (-weight(gaps[i]) * over.freed_first(gaps[i]) / self.cost(gaps[i], prices), i)
            for i in sorted(seen)
        ]
        heapq.heapify(heap)
        while over.some and heap:
            _, i = heapq.heappop(heap)
            profit = self._profit(gaps[i], over, prices, weight)
            if profit <= 0:
                continue
            if heap and profit < -heap[0][0] * near - 1e-12:
                heapq.heappush(heap, (-profit, i))
                continue
            before = self.values.get(gaps[i].value, 0)
            self.add(i)
            over.lower(self.held, gaps[i])
            if not before:  # the discount makes the other gaps of this value cheaper
                for k in self._siblings(i):
                    if k in seen and k not in self.away:
                        again = self._profit(gaps[k], over, prices, weight)
                        heapq.heappush(heap, (-again, k))
        return not over.some

    def _siblings(self, index: int) -> list[int]:
        gap = self.gaps.gaps[index]
        near = (index - 2, index - 1, index + 1, index + 2)
        return [
            k for k in near if 0 <= k < len(self.gaps.gaps) and self.gaps.gaps[k].value == gap.value
        ]

    def _profit(
        self, gap: Gap, over: _Over, prices: Prices, weight: Callable[[Gap], float]
    ) -> float:
        if gap.index in self.away:
            return 0.0
        return weight(gap) * over.freed(gap) / self.cost(gap, prices)

    def prune(self, capacity: float, prices: Prices, rng: random.Random | None = None) -> None:
        """Brings back tensors that need not be away, most expensive first."""
        gaps = self.gaps.gaps
        noise = {i: 1.0 if rng is None else rng.uniform(0.7, 1.3) for i in sorted(self.away)}
        order = sorted(self.away, key=lambda i: (-self.cost(gaps[i], prices) * noise[i], i))
        for i in order:
            if self.fits(i, capacity):
                self.remove(i)


class _Over:
    """The bytes over the limit in each cell, and how many of them a single gap would free."""

    def __init__(self, held: Sequence[float], limit: Sequence[float]) -> None:
        self.limit = limit
        self.left = [max(0, h - x) for h, x in zip(held, limit, strict=True)]
        over = self.cells()
        #: no cell is over before the first of these, or from the second on
        self.low, self.high = (over[0], over[-1] + 1) if over else (0, 0)
        self.most = max(self.left, default=0)
        self._sums: dict[int, list[float]] = {}

    @property
    def some(self) -> bool:
        return self.low < self.high

    def cells(self) -> list[int]:
        return [j for j, left in enumerate(self.left) if left]

    def freed(self, gap: Gap) -> float:
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
            parts = zip(left[a:b], held[a:b], self.limit[a:b], strict=True)
            left[a:b] = [h - x if before and h > x else 0 for before, h, x in parts]
        while self.low < self.high and not left[self.low]:
            self.low += 1
        while self.low < self.high and not left[self.high - 1]:
            self.high -= 1
        self.most = max(left, default=0)
