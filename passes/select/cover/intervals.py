"""Covers a need at every position with items that each cover a range of positions.

This is the abstract form of freeing device memory: the need is the excess over the budget at each
op, an item is a tensor that can be off the device for a while, and each of its ways has a cost.
This module has the data types and a partial choice; `search.py` looks for the cheapest one.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from .knapsack import knapsack

#: for each item the index of the way taken; None: not taken
Choice = tuple[int | None, ...]

SWAP_ROUNDS = 3
SWAP_WORK = 200_000  # with more pairs than this none is tried: then swaps gain almost nothing


@dataclass(frozen=True)
class CoverWay:
    """Covers the positions `first` to `last`, inclusive, and puts `load_bytes` on `tier`."""

    first: int
    last: int
    cost: float
    tier: str = ""
    load_bytes: int = 0


@dataclass(frozen=True)
class CoverItem:
    """Takes `nbytes` off the need at the positions that its chosen way covers."""

    nbytes: int
    ways: tuple[CoverWay, ...]


class Cover:
    """A partial choice. `left[p]` is the need still open at `p`; negative values are slack."""

    def __init__(
        self, items: Sequence[CoverItem], need: Sequence[int], limits: Mapping[str, int]
    ) -> None:
        corners = _corners(items, need)
        self.need = [need[p] for p in corners]
        self.left = list(self.need)
        self.sizes = [item.nbytes for item in items]
        self.ways = [item.ways for item in items]
        self.ranges = [
            [(bisect_left(corners, w.first), bisect_left(corners, w.last + 1)) for w in ways]
            for ways in self.ways
        ]
        self.choice: list[int | None] = [None] * len(items)
        self.limits = limits
        self.load = dict.fromkeys(limits, 0)

    def cost(self) -> float:
        return sum(self.ways[i][w].cost for i, w in enumerate(self.choice) if w is not None)

    def worst(self) -> int:
        return max(self.left, default=0)

    def fits(self, i: int, w: int) -> bool:
        way = self.ways[i][w]
        return self.load.get(way.tier, 0) + way.load_bytes <= self.limits.get(
            way.tier, way.load_bytes
        )

    def put(self, i: int, w: int | None) -> None:
        """Sets the way of item `i` to `w` (None: not taken)."""
        for way, sign in ((self.choice[i], 1), (w, -1)):
            if way is None:
                continue
            low, high = self.ranges[i][way]
            change = sign * self.sizes[i]
            self.left[low:high] = [x + change for x in self.left[low:high]]
            tier = self.ways[i][way].tier
            if tier in self.load:
                self.load[tier] -= sign * self.ways[i][way].load_bytes
        self.choice[i] = w

    def take_greedily(self) -> bool:
        """Takes items by open need covered per cost; gains only shrink, so re-evaluates lazily."""
        heap: list[tuple[float, int, int]] = []
        for i, ways in enumerate(self.ways):
            heap += [(-self._gain(i, w), i, w) for w in range(len(ways))]
        heapq.heapify(heap)
        while heap and self.worst() > 0:
            _, i, w = heapq.heappop(heap)
            if self.choice[i] is not None or not self.fits(i, w):
                continue
            gain = self._gain(i, w)
            if gain <= 0:
                continue
            if heap and -gain > heap[0][0]:
                heapq.heappush(heap, (-gain, i, w))
                continue
            self.put(i, w)
        return self.worst() <= 0

    def _gain(self, i: int, w: int) -> float:
        low, high = self.ranges[i][w]
        size = self.sizes[i]
        met = sum(min(size, x) for x in self.left[low:high] if x > 0)
        return met / max(self.ways[i][w].cost, 1e-9)

    def tightest(self) -> int:
        """Returns the position with the largest fraction of its need still open."""
        return max(range(len(self.left)), key=lambda p: self.left[p] / self.need[p], default=0)

    def take_at_the_worst(self) -> bool:
        """Solves the worst position by itself, then the worst remaining one, and so on."""
        while (worst := self.worst()) > 0:
            if not self.take_knapsack({self.left.index(worst): 1}):
                return False
        return True

    def take_knapsack(self, weights: Mapping[int, int]) -> bool:
        """Covers a weighted sum of open needs at some positions; False if no item could be added.

        A single inequality in place of many: a relaxation that a knapsack solves.
        """
        scale = {p: (x << 40) // self.need[p] + 1 for p, x in weights.items()}
        pool: dict[int, tuple[int, list[int]]] = {}
        for i, ways in enumerate(self.ways):
            if self.choice[i] is not None:
                continue
            gains = []
            for w, (low, high) in enumerate(self.ranges[i]):
                covered = sum(x for p, x in scale.items() if low <= p < high)
                if covered and self.fits(i, w):
                    gains.append((ways[w].cost / covered, w, covered * self.sizes[i]))
            if gains:
                gains.sort()
                pool[i] = (gains[0][2], [w for _, w, _ in gains])
        indices = list(pool)
        sizes = [pool[i][0] for i in indices]
        costs = [self.ways[i][pool[i][1][0]].cost for i in indices]
        wanted = sum(x * self.left[p] for p, x in scale.items())
        picked = [indices[k] for k in knapsack(sizes, costs, wanted)]
        # if a tier fills up, items that lose most per byte elsewhere go first
        for i in sorted(picked, key=lambda i: self._regret(i, pool[i][1])):
            way = next((w for w in pool[i][1] if self.fits(i, w)), None)
            if way is not None:
                self.put(i, way)
        return bool(picked)

    def _regret(self, i: int, ways: Sequence[int]) -> float:
        first = self.ways[i][ways[0]]
        other = next((self.ways[i][w] for w in ways if self.ways[i][w].tier != first.tier), None)
        lost = float("inf") if other is None else other.cost - first.cost
        return -lost / max(first.load_bytes, 1)

    def polish(self) -> None:
        """Removes redundant items and swaps items for cheaper ones, while that helps."""
        for _ in range(SWAP_ROUNDS):
            before = self.cost()
            for i in self._dearest_first():
                low, high = self.ranges[i][self.choice[i] or 0]
                if max(self.left[low:high], default=-self.sizes[i]) + self.sizes[i] <= 0:
                    self.put(i, None)
            taken = self._dearest_first()
            for i in taken if len(taken) * len(self.ways) <= SWAP_WORK else ():
                self._swap(i)
            if self.cost() >= before:
                break

    def _dearest_first(self) -> list[int]:
        taken = [(self.ways[i][w].cost, i) for i, w in enumerate(self.choice) if w is not None]
        return [i for _, i in sorted(taken, reverse=True)]

    def _swap(self, i: int) -> None:
        """Replaces item `i` by the cheapest way, its own or another's, that covers its need."""
        old = self.choice[i]
        if old is None:
            return
        limit = self.ways[i][old].cost
        self.put(i, None)
        left, most = self.left, self.worst()
        if most <= 0:
            return
        # all open need lies within the range of the item
        low, end_of_all = self.ranges[i][old]
        open_at = [p for p in range(low, end_of_all) if left[p] > 0]
        low, high = open_at[0], open_at[-1]
        for cost, j, w, first, end in self._cheapest_first:
            if cost >= limit:
                break
            if (
                first <= low
                and high < end
                and self.choice[j] is None
                and self.sizes[j] >= most
                and self.fits(j, w)
            ):
                self.put(j, w)
                return
        self.put(i, old)

    @cached_property
    def _cheapest_first(self) -> list[tuple[float, int, int, int, int]]:
        """(cost, item, its way, begin and end of its range) of all ways."""
        return sorted(
            (way.cost, j, w, *self.ranges[j][w])
            for j, ways in enumerate(self.ways)
            for w, way in enumerate(ways)
        )


def _corners(items: Sequence[CoverItem], need: Sequence[int]) -> list[int]:
    """Returns the relevant positions: the one of greatest need between any two range limits."""
    cuts = {0, len(need)}
    for item in items:
        for way in item.ways:
            cuts |= {way.first, way.last + 1}
    edges = sorted(c for c in cuts if 0 <= c <= len(need))
    corners = []
    for begin, end in pairwise(edges):
        at = max(range(begin, end), key=lambda p: need[p])
        if need[at] > 0:
            corners.append(at)
    return corners
