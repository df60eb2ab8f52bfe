"""Greedy choice of gaps in which weights are evicted (weight-offloading paper, §5).

Pure: takes gaps, bytes and estimated times, and returns the chosen gaps. Positions are those of
`Program`, and each is a cell of its own. `gap_set` makes the choice; this module says what a gap
frees and costs, by the paper or by us.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

from offcompile.passes.build.gaps import Gap, Gaps
from offcompile.passes.build.lanes import LaneClock

from .gap_set import GapSet, Price

#: no lane time counts as less
LEAST_US = 1e-9


@dataclass(frozen=True, slots=True)
class Need:
    """The gaps of weights and states, and the budget that evictions in them shall meet."""

    #: each frees the runs between its two uses (§5), whatever the time of its copies
    gaps: Gaps
    #: per gap the position at which its value is written; None: another tier has a copy
    written: tuple[int | None, ...]
    capacity: int
    steady: bool

    def with_reserve(self, nbytes: int) -> Need:
        """Returns the same need with `nbytes` less budget, to leave room for copies in flight."""
        return replace(self, capacity=self.capacity - nbytes)


class LaneTime:
    """§5's price: the load, plus the write-back unless another gap of the value pays for it."""

    def of(self, gap: Gap, writes: bool) -> float:
        return max(gap.in_us + (gap.out_us if writes else 0.0), LEAST_US)

    def taken(self, gap: Gap, writes: bool) -> None:
        pass


def without_copies(need: Need, clock: LaneClock) -> Gaps:
    """Returns the gaps without the runs that overlap the weight's own write-back or prefetch.

    The bytes stay allocated until the write-back has ended, and again from the start of the
    prefetch.
    """
    n, turns = len(need.gaps.full), 3 if need.steady else 1
    starts = [t * clock.period + x for t in range(turns) for x in clock.starts]
    ends = [t * clock.period + x for t in range(turns) for x in clock.ends]
    found = []
    for g, written in zip(need.gaps.gaps, need.written, strict=True):
        last = g.last if g.last > g.first else g.last + n
        low, high = g.first + 1, last
        if written is not None:
            gone_us = clock.end_of(written) + g.out_us
            if written > g.first:  # written in the step before
                gone_us -= clock.period
            low = max(low, bisect_left(starts, gone_us - 1e-9))
        if g.in_us:
            high = min(high, bisect_right(ends, starts[last] - g.in_us + 1e-9))
        found.append(replace(g, cells=_on_ring(low, high, n)))
    return replace(need.gaps, gaps=found)


def _on_ring(low: int, high: int, n: int) -> tuple[tuple[int, int], ...]:
    """Returns the positions from `low` to `high`, exclusive, which are counted past the end."""
    if low >= high:
        return ()
    low, high = low % n, low % n + high - low
    return ((low, high),) if high <= n else ((low, n), (0, high - n))


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
        gaps, self.n = need.gaps.gaps, len(need.gaps.full)
        self.clock = clock
        self.period = max(clock.period, 1e-9)
        mean_us = sum(g.in_us for g in gaps) / max(1, len(gaps))
        least, most = self.STRETCHES
        self.stretches = max(least, min(most, int(self.period / max(mean_us, 1e-9))))
        self.out, self.back = [0.0] * self.stretches, [0.0] * self.stretches

    def _places(self, at_us: float, step: int) -> list[int]:
        here = int(at_us / self.period * self.stretches)
        return [(here + step * k) % self.stretches for k in range(self.SPAN)]

    def _out(self, gap: Gap) -> list[int]:
        return self._places(self.clock.end_of(gap.first), 1)

    def _back(self, gap: Gap) -> list[int]:
        return self._places(self.clock.starts[gap.last % self.n], -1)

    def of(self, gap: Gap, writes: bool) -> float:
        price = gap.in_us * (1 + self.WEIGHT * sum(self.back[b] for b in self._back(gap)))
        if writes:
            price += gap.out_us * (1 + self.WEIGHT * sum(self.out[b] for b in self._out(gap)))
        return max(price, LEAST_US)

    def taken(self, gap: Gap, writes: bool) -> None:
        share = self.stretches / self.period / self.SPAN**2
        for b in self._back(gap):
            self.back[b] += gap.in_us * share
        for b in self._out(gap) if writes else ():
            self.out[b] += gap.out_us * share


def choose(need: Need, clock: LaneClock, variant: str) -> set[int]:
    """Returns the gaps in which a variant of the policy evicts."""
    gaps = need.gaps
    if variant in ("l2l", "l2l_overlapped"):
        return set(range(len(gaps.gaps)))
    if variant in ("printed", "printed_once"):
        if variant == "printed_once":  # no gap shares its write-back
            gaps = replace(gaps, gaps=[replace(g, value=g.index) for g in gaps.gaps])
        cover = GapSet(gaps)
        cover.repair(need.capacity, LaneTime(), exact=True)
        return cover.away
    cover = GapSet(without_copies(need, clock))
    prices: Price = Congestion(need, clock) if variant == "spread" else LaneTime()
    fits = cover.repair(need.capacity, prices, exact=True)
    cover.prune(need.capacity, LaneTime())
    if not fits:  # some copies will stall compute, but the evictions are needed
        cover = GapSet(gaps, cover.away)
        cover.repair(need.capacity, LaneTime(), exact=True)
    return cover.away
