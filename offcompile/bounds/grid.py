"""Where memory is looked at: the starts of some ops cut the step into slots."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .matrix import Ints
from .survey import Gap, Survey


@dataclass(frozen=True)
class Grid:
    """`samples` are op indices; slot k runs from sample k−1 to sample k.

    Slot 0 (before the first sample) exists only when the problem is not steady; when it is, the
    last slot runs on to the first sample of the next step.
    """

    n_ops: int
    steady: bool
    samples: Ints

    @property
    def n_slots(self) -> int:
        return len(self.samples) + 1

    def slot_of(self, op: int) -> int:
        """The slot in which `op` runs."""
        slot = int(np.searchsorted(self.samples, op, "right"))
        return len(self.samples) if self.steady and slot == 0 else slot

    def ops_of(self, slot: int) -> list[int]:
        """The ops that run in a slot, in order."""
        return self._ops[slot]

    @cached_property
    def _ops(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in range(self.n_slots)]
        edges = [0, *self.samples.tolist(), self.n_ops]
        for slot, (first, last) in enumerate(itertools.pairwise(edges)):
            found[slot] = list(range(first, last))
        if self.steady:
            found[-1] += found[0]
            found[0] = []
        return found

    def inside(self, gap: Gap) -> Ints:
        """Positions in `samples` of those strictly inside the gap, in order of time."""
        count = len(self.samples)
        lo = 0 if gap.before is None else int(np.searchsorted(self.samples, gap.before, "right"))
        hi = count if gap.after is None else int(np.searchsorted(self.samples, gap.after, "left"))
        if gap.wraps:
            return np.concatenate([np.arange(lo, count), np.arange(hi)])
        return np.arange(lo, hi)

    def slots(self, gap: Gap, inside: Ints) -> Ints:
        """The slots that the gap meets: one before each sample inside it, and one after."""
        first = 0 if gap.before is None else self.slot_of(gap.before)
        return np.concatenate([[first], inside + 1])

    def before_boundary(self, gap: Gap) -> int:
        """How many samples inside a gap that wraps come before the step ends."""
        assert gap.before is not None
        return len(self.samples) - int(np.searchsorted(self.samples, gap.before, "right"))


def fine(survey: Survey) -> Grid:
    """Every op is a sample."""
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
