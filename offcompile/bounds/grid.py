"""When memory is looked at: the ends of some ops cut the step into slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .matrix import Ints
from .survey import Gap, Survey


@dataclass(frozen=True)
class Grid:
    """`samples` are ops; memory is looked at just before each of them ends.

    Then a load that the next op waits for is largely there while this op still holds what it
    needs, which bounds more than looking when ops start ("Weight Offloading Strategies" §6).
    Slot k runs from the end of sample k−1 to the end of sample k. When the problem is steady
    there is no slot 0: the last slot runs on to the first sample of the next step.
    """

    n_ops: int
    steady: bool
    samples: Ints

    @property
    def n_slots(self) -> int:
        return len(self.samples) + 1

    def slot_of(self, op: int) -> int:
        """The slot in which `op` runs, and the wait for it lies."""
        slot = int(np.searchsorted(self.samples, op, "left"))
        return len(self.samples) if self.steady and slot == 0 else slot

    def ops_of(self, slot: int) -> list[int]:
        """The ops that run in a slot, in order."""
        return self._ops[slot]

    @cached_property
    def _ops(self) -> list[list[int]]:
        edges = [0, *(self.samples + 1).tolist(), self.n_ops]
        found = [list(range(first, last)) for first, last in itertools.pairwise(edges)]
        if self.steady:
            found[-1] += found[0]
            found[0] = []
        return found

    def inside(self, gap: Gap) -> Ints:
        """Positions in `samples` of those strictly inside the gap, in order of time."""
        count = len(self.samples)
        hi = count if gap.after is None else int(np.searchsorted(self.samples, gap.after, "left"))
        if gap.wraps:
            return np.concatenate([np.arange(self._first(gap), count), np.arange(hi)])
        return np.arange(self._first(gap), hi)

    def _first(self, gap: Gap) -> int:
        """The first sample after the op before the gap."""
        return 0 if gap.before is None else int(np.searchsorted(self.samples, gap.before, "right"))

    def slots(self, gap: Gap, inside: Ints) -> Ints:
        """The slots that the gap meets: at least one before the first sample inside it, one after.

        Moves of a tensor may run while an op only reads it, so that op's own slot comes first.
        """
        start = self._first(gap)
        first = len(self.samples) if self.steady and start == 0 else start
        slots = np.concatenate([[first], inside + 1])
        if gap.before is None or gap.new_value or self.slot_of(gap.before) == first:
            return slots
        return np.concatenate([[self.slot_of(gap.before)], slots])

    def before_boundary(self, gap: Gap) -> int:
        """How many samples inside a gap that wraps come before the step ends."""
        return len(self.samples) - self._first(gap)


def fine(survey: Survey) -> Grid:
    """Every op."""
    return Grid(survey.n_ops, survey.problem.steady, np.arange(survey.n_ops))


def coarse(survey: Survey, count: int) -> Grid:
    """About `count` samples: the most crowded op of each stretch of equal compute time.

    Merging slots only loses constraints (the traffic of a slot may then happen anywhere in the
    merged one, and memory is looked at less often), so a bound stays a bound.
    """
    n = survey.n_ops
    if count >= n:
        return fine(survey)
    ends = np.cumsum(np.maximum(np.array(survey.base_ns, dtype=float), 1e-3))
    stretch = np.minimum((ends / ends[-1] * count).astype(int), count - 1)
    picked = []
    for k in range(count):
        ops = np.flatnonzero(stretch == k)
        if len(ops):
            picked.append(int(ops[np.argmax(survey.wanted[ops])]))
    return Grid(n, survey.problem.steady, np.array(picked))
