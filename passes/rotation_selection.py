"""Which gaps of which weights to spend off the device: greedy choice (weight-offloading paper, §5).

Pure: gaps, bytes and estimated times in, chosen gaps out. Positions are those of `Program`; on the
ring of a steady problem a gap may run past the end of the step, so its end is counted onwards.

Near linear: the gain of a gap is a difference of prefix sums, kept per weight size and made anew
only when a choice changed what is still open; a gap's profit only falls as others are chosen (but
for the discount, which is told), so a heap of stale profits gives the best one after few looks.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat

from .lanes import Clock


@dataclass(frozen=True, slots=True)
class Gap:
    """A stretch between two uses of one tensor during which its device copy only waits."""

    tensor: str
    nbytes: int
    after: str | None  # the access before it
    first: int  # the position of that access
    last: int  # of the access after it; on a ring above `first`, perhaps beyond the end
    #: gaps of one value share its write-back (§3, the discount); None: nothing to write back
    value: tuple[str, int] | None
    out_us: float
    back_us: float  # 0: nobody uses the tensor again


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes over the budget at each run if every gap is spent on the device (below 0: room)."""

    excess: tuple[int, ...]
    gaps: tuple[Gap, ...]
    steady: bool


#: per gap, the positions freed: from, to (exclusive), counted onwards past the end of the ring
Coverage = Sequence[tuple[int, int]]


def plain_coverage(need: Need) -> Coverage:
    """§5: everything between the two uses, whatever the copies take."""
    return [(g.first + 1, g.last) for g in need.gaps]


def aware_coverage(need: Need, clock: Clock) -> Coverage:
    """Without the runs that overlap the weight's own write-back or its own prefetch."""
    n, turns = len(need.excess), 3 if need.steady else 1
    starts = [t * clock.period + x for t in range(turns) for x in clock.starts]
    ends = [t * clock.period + x for t in range(turns) for x in clock.ends]
    covered = []
    for g in need.gaps:
        low, high = g.first + 1, g.last
        if g.value is not None:
            written = g.value[1]
            gone = (ends[written] if written >= 0 else 0.0) + g.out_us
            if written > g.first:  # written in the step before
                gone -= clock.period
            low = max(low, bisect_left(starts, gone - 1e-9))
        if g.back_us:
            due = starts[g.last] if g.last < len(starts) else clock.period
            high = min(high, bisect_right(ends, due - g.back_us + 1e-9))
        covered.append((low, max(low, high)))
    return covered


class Congestion:
    """How busy each lane already is around the time of a copy: what spreads choices out."""

    def __init__(self, need: Need, clock: Clock, buckets: int, weight: float) -> None:
        self.period, self.weight = max(clock.period, 1e-9), weight
        self.buckets = buckets
        self.out, self.back = [0.0] * buckets, [0.0] * buckets
        self.clock, self.n = clock, len(need.excess)

    def _spread(self, lane: list[float], at_us: float, step: int) -> Iterator[int]:
        b = int(at_us / self.period * self.buckets)
        for k in range(WINDOW):
            yield (b + step * k) % self.buckets

    def _places(self, gap: Gap) -> tuple[list[int], list[int]]:
        clock = self.clock
        gone = clock.end_of(gap.first % self.n if gap.first >= 0 else -1)
        due = clock.starts[gap.last % self.n]
        return list(self._spread(self.out, gone, 1)), list(self._spread(self.back, due, -1))

    def price(self, gap: Gap, writes: bool) -> float:
        out, back = self._places(gap)
        price = gap.back_us * (1 + self.weight * sum(self.back[b] for b in back))
        if writes:
            price += gap.out_us * (1 + self.weight * sum(self.out[b] for b in out))
        return price

    def add(self, gap: Gap, writes: bool) -> None:
        out, back = self._places(gap)
        share = self.buckets / self.period / WINDOW / WINDOW
        for b in back:
            self.back[b] += gap.back_us * share
        for b in out if writes else ():
            self.out[b] += gap.out_us * share


import os
WINDOW = int(os.environ.get('WINDOW','2'))


class Selection:
    """Gaps chosen so far, and what is still open at each run."""

    def __init__(self, need: Need, coverage: Coverage) -> None:
        self.need, self.coverage = need, coverage
        self.n = len(need.excess)
        self.left = list(need.excess)
        self.chosen: set[int] = set()
        self.values: dict[tuple[str, int], int] = {}  # value → how many of its gaps are chosen
        self._sums: dict[int, list[int]] = {}

    def _pieces(self, i: int) -> Iterable[tuple[int, int]]:
        low, high = self.coverage[i]
        if low >= high:
            return ()
        low, high = low % self.n, low % self.n + high - low
        return ((low, high),) if high <= self.n else ((low, self.n), (0, high - self.n))

    def _change(self, i: int, nbytes: int) -> None:
        for low, high in self._pieces(i):
            self.left[low:high] = [x + nbytes for x in self.left[low:high]]
        self._sums.clear()

    def writes(self, i: int) -> bool:
        """Whether the gap would add a write-back."""
        value = self.need.gaps[i].value
        return value is not None and self.values.get(value, 0) - (i in self.chosen) == 0

    def add(self, i: int) -> None:
        gap = self.need.gaps[i]
        self.chosen.add(i)
        if gap.value is not None:
            self.values[gap.value] = self.values.get(gap.value, 0) + 1
        self._change(i, -gap.nbytes)

    def remove(self, i: int) -> None:
        gap = self.need.gaps[i]
        self.chosen.discard(i)
        if gap.value is not None:
            self.values[gap.value] -= 1
        self._change(i, gap.nbytes)

    def gain(self, i: int) -> int:
        """Bytes over budget that the gap would take away, summed over the runs it covers."""
        size = self.need.gaps[i].nbytes
        sums = self._sums.get(size)
        if sums is None:
            open_bytes = (min(x, size) if x > 0 else 0 for x in self.left)
            sums = self._sums[size] = list(accumulate(open_bytes, initial=0))
        return sum(sums[high] - sums[low] for low, high in self._pieces(i))

    def spare(self, i: int) -> bool:
        """Whether the chosen gap could be spent on the device after all."""
        size = self.need.gaps[i].nbytes
        return all(max(self.left[low:high]) <= -size for low, high in self._pieces(i))


def greedy(
    selection: Selection, price: Callable[[Gap, bool], float], discount: bool = True,
    chosen: Callable[[Gap, bool], None] = lambda gap, writes: None,
) -> None:
    """Algorithm 1: take the gap with most gain for its price until nothing is over the budget."""
    gaps = selection.need.gaps
    siblings: dict[tuple[str, int], list[int]] = {}
    for i, gap in enumerate(gaps):
        if gap.value is not None:
            siblings.setdefault(gap.value, []).append(i)

    def profit(i: int) -> float:
        writes = gaps[i].value is not None if not discount else selection.writes(i)
        return selection.gain(i) / max(price(gaps[i], writes), 1e-9)

    heap = [(-profit(i), i) for i in range(len(gaps)) if i not in selection.chosen]
    heapq.heapify(heap)
    while heap and max(selection.left) > 0:
        i = heapq.heappop(heap)[1]
        if i in selection.chosen:
            continue
        now = profit(i)
        if now <= 0:
            continue
        if heap and now < -heap[0][0] - 1e-12:
            heapq.heappush(heap, (-now, i))
            continue
        writes = selection.writes(i)
        chosen(gaps[i], writes)
        selection.add(i)
        if discount and writes:
            for k in siblings[gaps[i].value]:  # type: ignore[index]
                if k not in selection.chosen:
                    heapq.heappush(heap, (-profit(k), k))


def prune(selection: Selection, price: Callable[[Gap, bool], float]) -> None:
    """Keep on the device what need not leave, dearest first."""
    gaps = selection.need.gaps
    cost = {i: price(gaps[i], selection.writes(i)) for i in selection.chosen}
    for i in sorted(selection.chosen, key=lambda i: (-cost[i], i)):
        if selection.spare(i):
            selection.remove(i)
