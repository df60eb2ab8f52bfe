"""Chooses gaps until nothing exceeds capacity: greedy by bytes per lane time, then pruned.

The joint search and weight rotation both choose so, by different prices.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offcompile.passes.build.gaps import Gap, Gaps

from .excess import excess


class Price(Protocol):
    """The price of an eviction: lane time in microseconds, or a similar penalty."""

    def of(self, gap: Gap, writes: bool) -> float:
        """Returns the price, above 0. writes: True if the write-back is still to be paid for."""

    def taken(self, gap: Gap, writes: bool) -> None:
        """Takes note of an eviction; this may raise prices, but lowers none."""


@dataclass(frozen=True)
class Prices:
    """The price of a microsecond in each direction, by how busy the direction is."""

    out: float = 1.0
    back: float = 1.0

    def of(self, gap: Gap, writes: bool) -> float:
        return (gap.out_us if writes else 0.0) * self.out + gap.in_us * self.back + 1e-9

    def taken(self, gap: Gap, writes: bool) -> None:
        pass


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

    def writes(self, gap: Gap) -> bool:
        """True if the gap adds a write-back; evictions of one value share theirs."""
        return gap.dirty and self.values.get(gap.value, 0) == (gap.index in self.away)

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
        prices: Price,
        weight: Callable[[Gap], float] = lambda gap: 1.0,
        forbidden: frozenset[int] = frozenset(),
        exact: bool = False,
    ) -> bool:
        """Evicts in gaps, most bytes per price first, until every run fits.

        exact: compares all gaps of a value again once its write-back is paid for, and always takes
        the best gap; this is slower.
        """
        limit = [capacity] * len(self.held) if isinstance(capacity, (int, float)) else capacity
        gaps, away, values = self.gaps.gaps, self.away, self.values
        over = excess(self.held, limit)

        def profit(gap: Gap, freed: Callable[[Gap], float]) -> float:
            writes = gap.dirty and not values.get(gap.value)
            return weight(gap) * freed(gap) / prices.of(gap, writes)

        # lazy greedy: a gap's profit only falls as others are chosen, so a stale top is re-priced;
        # with very many gaps, one nearly as good as the best will do
        near, slack = (1 - 1e-12, 0.0) if exact else (1.0 if len(gaps) < 500 else 0.85, 1e-12)
        seen = set(self.gaps.over(over.cells())) - away - forbidden
        heap = [(-profit(gaps[i], over.freed_first), i) for i in sorted(seen)]
        heapq.heapify(heap)
        while over.some and heap:
            _, i = heapq.heappop(heap)
            gap = gaps[i]
            gain = 0.0 if i in away else profit(gap, over.freed)
            if gain <= 0:
                continue
            if heap and gain < -heap[0][0] * near - slack:
                heapq.heappush(heap, (-gain, i))
                continue
            first = not values.get(gap.value)
            prices.taken(gap, gap.dirty and first)
            self.add(i)
            over.lower(self.held, gap)
            if first:  # the discount makes the other gaps of this value cheaper
                for k in self.gaps.siblings[gap.value]:
                    if k in seen and k not in away and (exact or abs(k - i) <= 2):
                        heapq.heappush(heap, (-profit(gaps[k], over.freed), k))
        return not over.some

    def prune(self, capacity: float, prices: Price, rng: random.Random | None = None) -> None:
        """Brings back tensors that need not be away, most expensive first."""
        gaps = self.gaps.gaps
        noise = {i: 1.0 if rng is None else rng.uniform(0.7, 1.3) for i in sorted(self.away)}
        cost = {i: prices.of(gaps[i], self.writes(gaps[i])) * x for i, x in noise.items()}
        for i in sorted(cost, key=lambda i: (-cost[i], i)):
            if self.fits(i, capacity):
                self.remove(i)
