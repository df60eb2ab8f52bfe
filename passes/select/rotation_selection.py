"""Greedy choice of gaps in which weights are evicted (weight-offloading paper, §5).

Pure: takes gaps, bytes and estimated times, and returns the chosen gaps. Positions are those of
`Program`; on the ring of a steady problem a gap may extend past the end of the step, and its end is
then counted onwards.

Fast for deep nets: gains are summed block by block, and a gap's profit only falls as others are
chosen (except for the discount, which is signalled), so a heap of stale profits finds the best gap
after a few look-ups.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from offcompile.passes.build.lanes import LaneClock


@dataclass(frozen=True, slots=True)
class RotationGap:
    """An interval between two uses of a tensor in which its device copy only waits."""

    tensor: str
    nbytes: int
    after: str | None  # the access before it
    tier: str  # where it would be evicted to
    first: int  # the position of that access
    last: int  # that of the access after it; on a ring above `first`, perhaps beyond the end
    #: (tensor, position of its write): gaps of one value share its write-back (§3, the discount);
    #: None: another tier already has a copy
    value: tuple[str, int] | None
    out_us: float
    back_us: float  # 0: the tensor is not used again


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes over the budget at each run without any eviction (negative: free)."""

    excess: tuple[int, ...]
    gaps: tuple[RotationGap, ...]
    steady: bool

    def with_reserve(self, nbytes: int) -> Need:
        """Returns the same need with `nbytes` less budget, to leave room for copies in flight."""
        return replace(self, excess=tuple(x + nbytes for x in self.excess))


#: per gap, the positions freed: from, to (exclusive), counted onwards past the end of the ring
Coverage = Sequence[tuple[int, int]]
#: lane time in microseconds, or a similar penalty, of a gap; the flag says if its write-back is
#: still to be paid
Price = Callable[[RotationGap, bool], float]


def lane_time(gap: RotationGap, writes: bool) -> float:
    """§5's cost: the load, plus the write-back unless another gap of the value pays for it."""
    return gap.back_us + (gap.out_us if writes else 0.0)


def plain_coverage(need: Need) -> Coverage:
    """§5: covers everything between the two uses, ignoring the time of the copies."""
    return [(g.first + 1, g.last) for g in need.gaps]


def aware_coverage(need: Need, clock: LaneClock) -> Coverage:
    """Returns coverage without the runs that overlap the weight's own write-back or prefetch.

    The bytes stay allocated until the write-back has ended, and again from the start of the
    prefetch.
    """
    turns = 3 if need.steady else 1
    starts = [t * clock.period + x for t in range(turns) for x in clock.starts]
    ends = [t * clock.period + x for t in range(turns) for x in clock.ends]
    covered = []
    for g in need.gaps:
        low, high = g.first + 1, g.last
        if g.value is not None:
            written = g.value[1]
            gone_us = clock.end_of(written) + g.out_us
            if written > g.first:  # written in the step before
                gone_us -= clock.period
            low = max(low, bisect_left(starts, gone_us - 1e-9))
        if g.back_us:
            high = min(high, bisect_right(ends, starts[g.last] - g.back_us + 1e-9))
        covered.append((low, max(low, high)))
    return covered


class Congestion:
    """Prices that rise where a lane is already busy, so that the chosen gaps spread over the step.

    Equal layers have consecutive gaps of nearly equal profit; if these are all taken, their copies
    crowd the lanes at two moments of the step. Each lane's step is divided into stretches of about
    one copy; a copy occupies the stretch it would run in and the one before (load) or after it
    (eviction).
    """

    STRETCHES = (8, 4096)  # least and most
    SPAN = 2
    WEIGHT = 20.0  # price factor of a full lane

    def __init__(self, need: Need, clock: LaneClock) -> None:
        self.clock, self.n = clock, len(need.excess)
        self.period = max(clock.period, 1e-9)
        mean_us = sum(g.back_us for g in need.gaps) / max(1, len(need.gaps))
        least, most = self.STRETCHES
        self.stretches = max(least, min(most, int(self.period / max(mean_us, 1e-9))))
        self.out, self.back = [0.0] * self.stretches, [0.0] * self.stretches

    def _places(self, at_us: float, step: int) -> list[int]:
        here = int(at_us / self.period * self.stretches)
        return [(here + step * k) % self.stretches for k in range(self.SPAN)]

    def _out(self, gap: RotationGap) -> list[int]:
        return self._places(self.clock.end_of(gap.first), 1)

    def _back(self, gap: RotationGap) -> list[int]:
        return self._places(self.clock.starts[gap.last % self.n], -1)

    def price(self, gap: RotationGap, writes: bool) -> float:
        price = gap.back_us * (1 + self.WEIGHT * sum(self.back[b] for b in self._back(gap)))
        if writes:
            price += gap.out_us * (1 + self.WEIGHT * sum(self.out[b] for b in self._out(gap)))
        return price

    def take(self, gap: RotationGap, writes: bool) -> None:
        share = self.stretches / self.period / self.SPAN**2
        for b in self._back(gap):
            self.back[b] += gap.back_us * share
        for b in self._out(gap) if writes else ():
            self.out[b] += gap.out_us * share


class Selection:
    """The gaps chosen so far, and the bytes still over the budget at each run.

    Runs are grouped in blocks with known minimum, maximum and summed excess.
    """

    BLOCK = 48

    def __init__(self, need: Need, coverage: Coverage, chosen: Iterable[int] = ()) -> None:
        self.need, self.coverage, self.n = need, coverage, len(need.excess)
        self.left = list(need.excess)
        self.chosen: set[int] = set()
        self.values: dict[tuple[str, int], int] = {}  # value → how many of its gaps are chosen
        count = -(-self.n // self.BLOCK)
        self._least, self._most, self._over = [0] * count, [0] * count, [0] * count
        self._survey(0, self.n)
        for i in chosen:
            self.add(i)

    @property
    def worst(self) -> int:
        return max(self._most, default=0)

    def _survey(self, low: int, high: int) -> None:
        """Updates the blocks that contain these positions."""
        for b in range(low // self.BLOCK, -(-high // self.BLOCK)):
            block = self.left[b * self.BLOCK : (b + 1) * self.BLOCK]
            self._least[b], self._most[b] = min(block), max(block)
            self._over[b] = sum(x for x in block if x > 0) if self._most[b] > 0 else 0

    def _pieces(self, i: int) -> tuple[tuple[int, int], ...]:
        low, high = self.coverage[i]
        if low >= high:
            return ()
        low, high = low % self.n, low % self.n + high - low
        return ((low, high),) if high <= self.n else ((low, self.n), (0, high - self.n))

    def _change(self, i: int, nbytes: int, count: int) -> None:
        for low, high in self._pieces(i):
            self.left[low:high] = [x + nbytes for x in self.left[low:high]]
            self._survey(low, high)
        value = self.need.gaps[i].value
        if value is not None:
            self.values[value] = self.values.get(value, 0) + count

    def add(self, i: int) -> None:
        self.chosen.add(i)
        self._change(i, -self.need.gaps[i].nbytes, 1)

    def remove(self, i: int) -> None:
        self.chosen.discard(i)
        self._change(i, self.need.gaps[i].nbytes, -1)

    def writes(self, i: int) -> bool:
        """True if this gap adds a write-back to those of the other gaps chosen."""
        value = self.need.gaps[i].value
        return value is not None and self.values.get(value, 0) == (i in self.chosen)

    def gain(self, i: int) -> int:
        """Returns the excess bytes that the gap would remove, summed over the runs it covers."""
        size = self.need.gaps[i].nbytes
        return sum(self._gain(low, high, size) for low, high in self._pieces(i))

    def _gain(self, low: int, high: int, size: int) -> int:
        first, last = -(-low // self.BLOCK), high // self.BLOCK
        if first >= last:
            return _within(self.left[low:high], size)
        gain = _within(self.left[low : first * self.BLOCK], size)
        gain += _within(self.left[last * self.BLOCK : high], size)
        for b in range(first, last):
            if self._least[b] >= size:
                gain += size * self.BLOCK
            elif self._most[b] <= size:
                gain += self._over[b]
            else:
                gain += _within(self.left[b * self.BLOCK : (b + 1) * self.BLOCK], size)
        return gain

    def spare(self, i: int) -> bool:
        """True if the tensor could stay on the device in this chosen gap after all."""
        size = self.need.gaps[i].nbytes
        return all(max(self.left[low:high]) <= -size for low, high in self._pieces(i))


def _within(excess: Sequence[int], size: int) -> int:
    return sum([x if x < size else size for x in excess if x > 0])


def greedy(
    selection: Selection,
    price: Price = lane_time,
    discount: bool = True,
    take: Callable[[RotationGap, bool], None] | None = None,
) -> None:
    """Algorithm 1: takes the gap with most gain per price until nothing exceeds the budget.

    `price` may only rise as gaps are taken; `take` is called for each.
    """
    gaps, chosen = selection.need.gaps, selection.chosen
    siblings: dict[tuple[str, int], list[int]] = {}
    for i, gap in enumerate(gaps):
        if gap.value is not None:
            siblings.setdefault(gap.value, []).append(i)

    def profit(i: int) -> float:
        gain = selection.gain(i)
        if not gain:
            return 0.0
        writes = selection.writes(i) if discount else gaps[i].value is not None
        return gain / max(price(gaps[i], writes), 1e-9)

    heap = [(-profit(i), i) for i in range(len(gaps)) if i not in chosen]
    heapq.heapify(heap)
    while heap and selection.worst > 0:
        i = heapq.heappop(heap)[1]
        now = 0.0 if i in chosen else profit(i)
        if now <= 0:
            continue
        if heap and now < -heap[0][0] * (1 - 1e-12):
            heapq.heappush(heap, (-now, i))
            continue
        gap, writes = gaps[i], selection.writes(i)
        if take is not None:
            take(gap, writes)
        selection.add(i)
        if discount and writes and gap.value is not None:
            for k in siblings[gap.value]:  # the write-back is now paid for: they gain value
                if k not in chosen:
                    heapq.heappush(heap, (-profit(k), k))


def prune(selection: Selection) -> None:
    """Keeps on the device tensors that need not leave, most expensive first."""
    gaps = selection.need.gaps
    cost = {i: lane_time(gaps[i], selection.writes(i)) for i in selection.chosen}
    for i in sorted(selection.chosen, key=lambda i: (-cost[i], i)):
        if selection.spare(i):
            selection.remove(i)


def choose(need: Need, clock: LaneClock, variant: str) -> set[int]:
    """Returns the gaps in which a variant of the policy evicts."""
    if variant in ("l2l", "l2l_overlapped"):
        return set(range(len(need.gaps)))
    if variant in ("printed", "printed_once"):
        selection = Selection(need, plain_coverage(need))
        greedy(selection, discount=variant == "printed")
        return selection.chosen
    selection = Selection(need, aware_coverage(need, clock))
    if variant == "spread":
        congestion = Congestion(need, clock)
        greedy(selection, congestion.price, take=congestion.take)
    else:
        greedy(selection)
    prune(selection)
    if selection.worst > 0:  # some copies will stall compute, but the evictions are needed
        selection = Selection(need, plain_coverage(need), sorted(selection.chosen))
        greedy(selection)
    return selection.chosen
