"""When memory is looked at: the starts, or starts and ends, of some ops cut the step into slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from .matrix import Ints
from .survey import Gap, Survey


@dataclass(frozen=True)
class Grid:
    """`samples` are instants: 2k is the start of op k, 2k + 1 the moment before it ends.

    Slot k runs from sample k−1 to sample k. Slot 0 (before the first sample) exists only when
    the problem is not steady; when it is, the last slot runs on to the first sample of the next
    step.
    """

    n_ops: int
    steady: bool
    samples: Ints

    @property
    def n_slots(self) -> int:
        return len(self.samples) + 1

    def slot_after(self, op: int) -> int:
        """The slot in which `op` ends."""
        slot = int(np.searchsorted(self.samples, 2 * op + 1, "right"))
        return len(self.samples) if self.steady and slot == 0 else slot

    def slot_before(self, op: int) -> int:
        """The slot in which the wait for `op` lies."""
        slot = self._position(2 * op, "left")
        return len(self.samples) if self.steady and slot == 0 else slot

    def ops_of(self, slot: int) -> list[int]:
        """The ops whose time lies in a slot, in order."""
        return self._ops[slot]

    @cached_property
    def _ops(self) -> list[list[int]]:
        edges = [0, *self.samples.tolist(), 2 * self.n_ops]
        found = [
            list(range((first + 1) // 2, (last + 1) // 2))
            for first, last in itertools.pairwise(edges)
        ]
        if self.steady:
            found[-1] += found[0]
            found[0] = []
        return found

    def inside(self, gap: Gap) -> Ints:
        """Positions in `samples` of those strictly inside the gap, in order of time."""
        count = len(self.samples)
        lo = self._first(gap)
        hi = count if gap.after is None else self._position(2 * gap.after, "left")
        if gap.wraps:
            return np.concatenate([np.arange(lo, count), np.arange(hi)])
        return np.arange(lo, hi)

    def slots(self, gap: Gap, inside: Ints) -> Ints:
        """The slots that the gap meets: one before each sample inside it, and one after.

        While an op only reads the tensor, moves of it may run: then the slot of that op comes
        first, where it is a slot of its own.
        """
        if gap.before is None:
            return np.concatenate([[0], inside + 1])
        slots = np.concatenate([[self.slot_after(gap.before)], inside + 1])
        own = self._position(2 * gap.before + 1, "left")
        cut = own < len(self.samples) and self.samples[own] == 2 * gap.before + 1
        return np.concatenate([[own], slots]) if cut and not gap.new_value else slots

    def before_boundary(self, gap: Gap) -> int:
        """How many samples inside a gap that wraps come before the step ends."""
        return len(self.samples) - self._first(gap)

    def _first(self, gap: Gap) -> int:
        return 0 if gap.before is None else self._position(2 * gap.before + 1, "right")

    def _position(self, instant: int, side: Literal["left", "right"]) -> int:
        return int(np.searchsorted(self.samples, instant, side))


def fine(survey: Survey) -> Grid:
    """The start of every op."""
    return Grid(survey.n_ops, survey.problem.steady, 2 * np.arange(survey.n_ops))


def full(survey: Survey) -> Grid:
    """The start and the end of every op."""
    return Grid(survey.n_ops, survey.problem.steady, np.arange(2 * survey.n_ops))


def ends(survey: Survey) -> Grid:
    """The end of every op."""
    return Grid(survey.n_ops, survey.problem.steady, 2 * np.arange(survey.n_ops) + 1)


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
    return Grid(n, survey.problem.steady, 2 * np.array(picked))
