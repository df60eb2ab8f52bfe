"""Cover a need at every position with things that each cover a range of positions, cheaply.

What freeing device memory comes to: the need is the excess over the budget op by op, a thing is
a tensor that can be off the device for a while, and each of its ways has a cost. Two starts, one
greedy by need met per cost and one exact at the worst position (within `TOLERANCE`), are each
freed of what is redundant and improved by swaps; the cheaper one is the answer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod

#: for each item the index of the way taken; None: it is left alone
Choice = tuple[int | None, ...]

TOLERANCE = 5e-4  # relative; states of the knapsack that cannot gain more than this are given up
MAX_STATES = 3000
SWAP_ROUNDS = 3
ROUNDS = 12
EXHAUSTIVE = 50_000  # up to so many choices all are tried


@dataclass(frozen=True)
class Way:
    """Covers the positions `first` to `last`, inclusive, and puts `load_bytes` on `tier`."""

    first: int
    last: int
    cost: float
    tier: str = ""
    load_bytes: int = 0


@dataclass(frozen=True)
class Item:
    """Takes `nbytes` off the need where the way taken covers it."""

    nbytes: int
    ways: tuple[Way, ...]


def cover(
    items: Sequence[Item],
    need: Sequence[int],
    limits: Mapping[str, int] | None = None,
    rounds: int = ROUNDS,
) -> Choice | None:
    """The cheapest choice found that covers `need` everywhere; None if none was found.

    `limits`: the bytes that a tier takes in altogether (tiers not named: any).
    """
    empty = _Cover(items, need, limits or {})
    best: _Cover | None = None
    weights = {empty.tightest(): 1} if empty.need else {}
    for _ in range(rounds):
        state = _Cover(items, need, limits or {})
        state.take_knapsack(weights)
        # a solution of the weighted sum that covers all positions is optimal for them all
        done = state.worst() <= 0
        at = state.tightest()
        if state.take_at_the_worst():
            state.polish()
            if best is None or state.cost() < best.cost():
                best = state
        if done:
            break
        weights[at] = weights.get(at, 0) + 1
    if (best is None or rounds >= ROUNDS) and empty.take_greedily():
        empty.polish()
        if best is None or empty.cost() < best.cost():
            best = empty
    if rounds >= ROUNDS and prod(len(item.ways) + 1 for item in items) <= EXHAUSTIVE:
        return _Cover(items, need, limits or {}).exhaust(best)
    return None if best is None else tuple(best.choice)


def knapsack(sizes: Sequence[int], costs: Sequence[float], need: int) -> list[int]:
    """Indices whose sizes reach `need` at the least cost, within `TOLERANCE`; all if none do.

    States that no other beats in both size and cost, pruned by the fractional bound.
    """
    order = sorted(range(len(sizes)), key=lambda i: (costs[i] / sizes[i], i))
    size_sum = list(accumulate((sizes[i] for i in order), initial=0))
    cost_sum = list(accumulate((costs[i] for i in order), initial=0.0))
    if size_sum[-1] < need:
        return sorted(order)
    count = len(order)

    def completion(covered: int, at: int) -> int:
        return bisect_left(size_sum, need - covered + size_sum[at], at)

    # a state is (cost, covered, the items taken as a linked list)
    start = completion(0, 0)
    best_cost = cost_sum[start]
    best: tuple[object, int, int] = (None, 0, start)  # taken, then all of order[from:to]
    states: list[tuple[float, int, object]] = [(0.0, 0, None)]
    for at in range(count):
        i = order[at]
        added = [(c + costs[i], s + sizes[i], (at, t)) for c, s, t in states]
        kept: list[tuple[float, float, int, object]] = []
        most = -1
        for cost, covered, taken in heapq.merge(states, added, key=lambda x: (x[0], -x[1])):
            if covered <= most:
                continue
            most = covered
            if covered >= need:
                if cost < best_cost:
                    best_cost, best = cost, (taken, 0, 0)
                break  # whatever is dearer need not be looked at
            end = completion(covered, at + 1)
            if end > count:
                continue
            full = cost + cost_sum[end] - cost_sum[at + 1]
            if full < best_cost:
                best_cost, best = full, (taken, at + 1, end)
            step = size_sum[end] - size_sum[end - 1]
            over = size_sum[end] - size_sum[at + 1] - (need - covered)
            bound = full - (cost_sum[end] - cost_sum[end - 1]) * over / step
            if bound < best_cost * (1 - TOLERANCE):
                kept.append((bound, cost, covered, taken))
        if len(kept) > MAX_STATES:
            kept = heapq.nsmallest(MAX_STATES, kept, key=lambda x: (x[0], x[1]))
            kept.sort(key=lambda x: (x[1], -x[2]))
        states = [(cost, covered, taken) for _, cost, covered, taken in kept]
        if not states:
            break
    link, begin, end = best
    result = [order[at] for at in range(begin, end)]
    while isinstance(link, tuple):
        result.append(order[link[0]])
        link = link[1]
    return sorted(result)


class _Cover:
    """A choice in the making. `left[p]` is the need still open at `p`; below 0 it is slack."""

    def __init__(
        self, items: Sequence[Item], need: Sequence[int], limits: Mapping[str, int]
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
        """Make `w` the way of item `i` (None: leave it alone)."""
        for way, sign in ((self.choice[i], 1), (w, -1)):
            if way is None:
                continue
            low, high = self.ranges[i][way]
            change = sign * self.sizes[i]
            for p in range(low, high):
                self.left[p] += change
            tier = self.ways[i][way].tier
            if tier in self.load:
                self.load[tier] -= sign * self.ways[i][way].load_bytes
        self.choice[i] = w

    def take_greedily(self) -> bool:
        """Take what meets most of the open need per cost; gains only shrink, so look lazily."""
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
        """The position whose need is open in the greatest part."""
        return max(range(len(self.left)), key=lambda p: self.left[p] / self.need[p], default=0)

    def take_at_the_worst(self) -> bool:
        """Solve the worst position by itself, then the worst of what remains, and so on."""
        while (worst := self.worst()) > 0:
            if not self.take_knapsack({self.left.index(worst): 1}):
                return False
        return True

    def take_knapsack(self, weights: Mapping[int, int]) -> bool:
        """Cover a weighted sum of what is open at some positions; False if nothing could go in.

        One inequality instead of many, and so a relaxation that a knapsack solves.
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
        # where a tier fills up, those go first that lose most per byte by going elsewhere
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

    def exhaust(self, known: _Cover | None) -> Choice | None:
        """The best of all choices, dearest items decided first; `known` is where to beat from."""
        order = sorted(
            (i for i, ways in enumerate(self.ways) if ways),
            key=lambda i: -min(way.cost for way in self.ways[i]),
        )
        best: Choice | None = None if known is None else tuple(known.choice)
        best_cost = float("inf") if known is None else known.cost()

        def decide(at: int, cost: float) -> None:
            nonlocal best, best_cost
            if cost >= best_cost:
                return
            if self.worst() <= 0:
                best, best_cost = tuple(self.choice), cost
                return
            if at == len(order) or self.worst() > sum(self.sizes[i] for i in order[at:]):
                return
            i = order[at]
            decide(at + 1, cost)
            for w in range(len(self.ways[i])):
                if self.fits(i, w):
                    self.put(i, w)
                    decide(at + 1, cost + self.ways[i][w].cost)
                    self.put(i, None)

        decide(0, 0.0)
        return best

    def polish(self) -> None:
        """Give back what is redundant and swap for what is cheaper, while that helps."""
        for _ in range(SWAP_ROUNDS):
            before = self.cost()
            for i in self._dearest_first():
                low, high = self.ranges[i][self.choice[i] or 0]
                if max(self.left[low:high], default=-self.sizes[i]) + self.sizes[i] <= 0:
                    self.put(i, None)
            for i in self._dearest_first():
                self._swap(i)
            if self.cost() >= before:
                break

    def _dearest_first(self) -> list[int]:
        taken = [(self.ways[i][w].cost, i) for i, w in enumerate(self.choice) if w is not None]
        return [i for _, i in sorted(taken, reverse=True)]

    def _swap(self, i: int) -> None:
        """Replace item `i` by the cheapest way, of itself or another, that does its work."""
        old = self.choice[i]
        if old is None:
            return
        limit = self.ways[i][old].cost
        self.put(i, None)
        open_at = [p for p, x in enumerate(self.left) if x > 0]
        if not open_at:
            return
        low, high, most = open_at[0], open_at[-1], self.worst()
        best: tuple[float, int, int] | None = None
        for j, ways in enumerate(self.ways):
            if self.choice[j] is not None or self.sizes[j] < most:
                continue
            for w, way in enumerate(ways):
                first, end = self.ranges[j][w]
                if way.cost < limit and first <= low and high < end and self.fits(j, w):
                    limit, best = way.cost, (way.cost, j, w)
        self.put(*((i, old) if best is None else best[1:]))


def _corners(items: Sequence[Item], need: Sequence[int]) -> list[int]:
    """The positions that matter: the greatest need between two where some range begins or ends."""
    cuts = {0, len(need)}
    for item in items:
        for way in item.ways:
            cuts |= {way.first, way.last + 1}
    edges = sorted(c for c in cuts if 0 <= c <= len(need))
    corners = []
    for begin, end in zip(edges, edges[1:], strict=False):
        at = max(range(begin, end), key=lambda p: need[p])
        if need[at] > 0:
            corners.append(at)
    return corners
