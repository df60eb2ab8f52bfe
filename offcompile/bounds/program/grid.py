"""The instants at which memory is checked: starts and ends of ops cut the step into slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from offcompile.bounds.highs import Ints
from offcompile.bounds.survey import Survey, SurveyGap


@dataclass(frozen=True)
class Grid:
    """`samples` are instants: 2k is the start of op k, 2k + 1 the moment before it ends.

    Checks at the ends of ops bound the loads: most operands of the next op are there while this
    op still holds its own. Checks at the starts ("Weight Offloading Strategies" §6) bound the
    transfers out.

    Slot k runs from sample k−1 to sample k. When the problem is steady there is no slot 0: the
    last slot runs on to the first sample of the next step.
    """

    n_ops: int
    steady: bool
    samples: Ints

    @property
    def n_slots(self) -> int:
        return len(self.samples) + 1

    def slot_before(self, op: int) -> int:
        """The slot that leads up to the start of `op`."""
        return self._slot(self._position(2 * op, "left"))

    def slot_after(self, op: int) -> int:
        """The slot that begins when `op` has ended, or in which it ends."""
        return self._slot(self._position(2 * op + 1, "right"))

    def _slot(self, position: int) -> int:
        return len(self.samples) if self.steady and position == 0 else position

    def _position(self, instant: int, side: Literal["left", "right"]) -> int:
        return int(np.searchsorted(self.samples, instant, side))

    def ops_of(self, slot: int) -> list[int]:
        """The ops that run in a slot, in order."""
        return self._ops[slot]

    @cached_property
    def _ops(self) -> list[list[int]]:
        edges = [0, *((self.samples + 1) // 2).tolist(), self.n_ops]
        found = [list(range(first, last)) for first, last in itertools.pairwise(edges)]
        if self.steady:
            found[-1] += found[0]
            found[0] = []
        return found

    def is_one_op(self, slot: int) -> bool:
        """True if the slot is exactly the time of one op, and so contains no waiting."""
        if not 0 < slot < len(self.samples):
            return False
        first, last = self.samples[slot - 1 : slot + 1].tolist()
        return bool(first % 2 == 0 and last == first + 1)

    def inside(self, gap: SurveyGap) -> Ints:
        """The positions of the samples strictly inside the gap, in order of time."""
        count = len(self.samples)
        hi = count if gap.after is None else self._position(2 * gap.after, "left")
        if gap.wraps:
            return np.concatenate([np.arange(self._first(gap), count), np.arange(hi)])
        return np.arange(self._first(gap), hi)

    def _first(self, gap: SurveyGap) -> int:
        """The first sample after the op before the gap."""
        return 0 if gap.before is None else self._position(2 * gap.before + 1, "right")

    def slots(self, gap: SurveyGap, inside: Ints) -> Ints:
        """The slots that the gap overlaps: at least one before its first sample, one after.

        Moves of a tensor may run while an op only reads it, so that op's own slot comes first.
        """
        first = self._slot(self._first(gap))
        slots = np.concatenate([[first], inside + 1])
        if gap.before is None or gap.new_value:
            return slots
        own = self._slot(self._position(2 * gap.before + 1, "left"))
        return slots if own == first else np.concatenate([[own], slots])

    def before_boundary(self, gap: SurveyGap) -> int:
        """The number of samples inside a wrapping gap that come before the step ends."""
        return len(self.samples) - self._first(gap)


def full(survey: Survey) -> Grid:
    """The start and the end of every op."""
    return Grid(survey.n_ops, survey.problem.steady, np.arange(2 * survey.n_ops))


def fine(survey: Survey) -> Grid:
    """The end of every op."""
    return Grid(survey.n_ops, survey.problem.steady, 2 * np.arange(survey.n_ops) + 1)


def coarse(survey: Survey, count: int) -> Grid:
    """About `count` samples: the most crowded op of each stretch of equal compute time.

    Merging slots only loses constraints (the traffic of a slot may then happen anywhere in the
    merged one, and memory is checked less often), so a bound stays a bound.
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
    return Grid(n, survey.problem.steady, 2 * np.array(picked) + 1)
