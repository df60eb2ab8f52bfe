"""Choosing gaps until nothing is over capacity: greedy by bytes per lane time, then pruned."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from .gaps import Gap, Gaps


@dataclass(frozen=True)
class Prices:
    """What a microsecond on each direction is worth, by how busy the direction is."""

    out: float = 1.0
    back: float = 1.0


class Cover:
    """A set of gaps spent away, with the bytes held in every cell kept up to date."""

    def __init__(self, gaps: Gaps, away: Iterable[int] = ()) -> None:
        self.gaps = gaps
        self.away: set[int] = set(away)
        self.held = gaps.held(self.away)
        self.values: dict[int, int] = {}  # value → how many of its gaps are away
        for i in self.away:
            value = gaps.gaps[i].value
            self.values[value] = self.values.get(value, 0) + 1

    def copy(self) -> Cover:
        other = Cover.__new__(Cover)
        other.gaps, other.away = self.gaps, set(self.away)
        other.held, other.values = list(self.held), dict(self.values)
        return other

    def add(self, index: int) -> None:
        gap = self.gaps.gaps[index]
        self.away.add(index)
        self.values[gap.value] = self.values.get(gap.value, 0) + 1
        for j in gap.cells:
            self.held[j] -= gap.tensor.nbytes

    def remove(self, index: int) -> None:
        gap = self.gaps.gaps[index]
        self.away.discard(index)
        self.values[gap.value] -= 1
        for j in gap.cells:
            self.held[j] += gap.tensor.nbytes

    def cost(self, gap: Gap, prices: Prices) -> float:
        """Lane time the gap adds; with another gap of its value away the write-back is paid."""
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
        """Whether the gap could be spent on the device after all."""
        gap = self.gaps.gaps[index]
        room = capacity - gap.tensor.nbytes
        return all(self.held[j] <= room for j in gap.cells)

    def repair(
        self,
        capacity: float | Sequence[float],
        prices: Prices,
        weight: Callable[[Gap], float] = lambda gap: 1.0,
        forbidden: frozenset[int] = frozenset(),
    ) -> bool:
        """Send gaps away, best bytes per lane time first, until every run fits."""
        limit = [capacity] * len(self.held) if isinstance(capacity, (int, float)) else capacity
        gaps = self.gaps.gaps
        over = {j: h - limit[j] for j, h in enumerate(self.held) if h > limit[j]}
        # lazy greedy: a gap's profit only falls as others are chosen, so a stale top is re-priced
        # among very many gaps one nearly as good as the best will do
        near = 1.0 if len(gaps) < 500 else 0.85
        seen = {i for j in over for i in self.gaps.at[j]} - self.away - forbidden
        freed = _Freed(over, len(self.held))
        heap = [
            (-weight(gaps[i]) * freed.by(gaps[i]) / self.cost(gaps[i], prices), i)
            for i in sorted(seen)
        ]
        heapq.heapify(heap)
        while over and heap:
            _, i = heapq.heappop(heap)
            profit = self._profit(gaps[i], over, prices, weight)
            if profit <= 0:
                continue
            if heap and profit < -heap[0][0] * near - 1e-12:
                heapq.heappush(heap, (-profit, i))
                continue
            before = self.values.get(gaps[i].value, 0)
            self.add(i)
            for j in gaps[i].cells:
                if j in over:
                    left = self.held[j] - limit[j]
                    if left > 0:
                        over[j] = left
                    else:
                        del over[j]
            if not before:  # the discount makes the other gaps of this value cheaper
                for k in self._siblings(i):
                    if k in seen and k not in self.away:
                        again = self._profit(gaps[k], over, prices, weight)
                        heapq.heappush(heap, (-again, k))
        return not over

    def _siblings(self, index: int) -> list[int]:
        gap = self.gaps.gaps[index]
        near = (index - 2, index - 1, index + 1, index + 2)
        return [
            k for k in near if 0 <= k < len(self.gaps.gaps) and self.gaps.gaps[k].value == gap.value
        ]

    def _profit(
        self,
        gap: Gap,
        over: dict[int, float],
        prices: Prices,
        weight: Callable[[Gap], float],
    ) -> float:
        if gap.index in self.away:
            return 0.0
        size = gap.tensor.nbytes
        freed = 0.0
        for j in gap.cells:  # the innermost loop of a search
            if j in over:
                left = over[j]
                freed += left if left < size else size
        return weight(gap) * freed / self.cost(gap, prices)

    def prune(self, capacity: float, prices: Prices, rng: random.Random | None = None) -> None:
        """Bring back what need not be away, dearest first."""
        gaps = self.gaps.gaps
        noise = {i: 1.0 if rng is None else rng.uniform(0.7, 1.3) for i in sorted(self.away)}
        order = sorted(self.away, key=lambda i: (-self.cost(gaps[i], prices) * noise[i], i))
        for i in order:
            if self.fits(i, capacity):
                self.remove(i)


class _Freed:
    """Bytes over the limit that gaps would free, each by itself.

    Many gaps are of few sizes: of each size the sums over all cells serve all of its gaps.
    """

    def __init__(self, over: Mapping[int, float], cells: int) -> None:
        self.over = [over.get(j, 0.0) for j in range(cells)]
        self._sums: dict[int, list[float]] = {}

    def by(self, gap: Gap) -> float:
        size, cells = gap.tensor.nbytes, gap.cells
        sums = self._sums.get(size)
        if sums is None:
            each = (left if left < size else size for left in self.over)
            sums = self._sums[size] = list(accumulate(each, initial=0.0))
        if not cells:
            return 0.0
        first, last = cells[0], cells[-1]
        if last - first + 1 == len(cells):
            return sums[last + 1] - sums[first]
        return sum(sums[j + 1] - sums[j] for j in cells)
