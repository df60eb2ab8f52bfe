"""Scales a step to other batch sizes, by linear interpolation between two traced batches.

Bytes are exact if every dimension is proportional to the batch or independent of it. A duration is
exact if the same hardware limit bounds the op for all batches in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offcompile.ir import Machine, Op, Problem, Tensor
from offcompile.planning.floors import floors_of_ways

#: relative precision of the largest batch
PRECISION = 0.01


def line_up(a: Problem, b: Problem) -> bool:
    """True if both have the same ops on the same tensors."""
    if len(a.ops) != len(b.ops) or a.tensor.keys() != b.tensor.keys():
        return False
    return all(
        (p.id, p.reads, p.writes) == (q.id, q.reads, q.writes)
        for p, q in zip(a.ops, b.ops, strict=True)
    )


@dataclass(frozen=True)
class Scale:
    """The same step, traced for a smaller and a larger batch."""

    small: Problem
    large: Problem
    batches: tuple[int, int]

    @property
    def lines_up(self) -> bool:
        return line_up(self.small, self.large)

    def floors(self, machine_for: Callable[[int], Machine]) -> ScaledFloors:
        small, large = (floors_of_ways(p, machine_for) for p in (self.small, self.large))
        runs = tuple(tuple(zip(a, b, strict=True)) for a, b in zip(small, large, strict=True))
        return ScaledFloors(runs, self.batches)

    def at(self, batch: int) -> Problem:
        small, large = self.batches
        share = (batch - small) / (large - small)

        def line(a: float, b: float) -> float:
            return max(0.0, a + (b - a) * share)

        def size(a: int, b: int) -> int:
            return math.ceil(line(a, b))

        def tensor(a: Tensor, b: Tensor) -> Tensor:
            return replace(a, nbytes=size(a.nbytes, b.nbytes))

        def op(a: Op, b: Op) -> Op:
            host = a.host_duration_us, b.host_duration_us
            return replace(
                a,
                duration_us=round(line(a.duration_us, b.duration_us), 3),
                workspace_bytes=size(a.workspace_bytes, b.workspace_bytes),
                direct={
                    t: round(line(us, b.direct[t]), 3)
                    for t, us in a.direct.items()
                    if t in b.direct
                },
                host_duration_us=None
                if host[0] is None or host[1] is None
                else round(line(host[0], host[1]), 3),
            )

        tensors = tuple(tensor(t, self.large.tensor[t.id]) for t in self.small.tensors)
        ops = tuple(op(a, b) for a, b in zip(self.small.ops, self.large.ops, strict=True))
        return replace(self.small, tensors=tensors, ops=ops)


@dataclass(frozen=True)
class ScaledFloors:
    """Device bytes that each run of a step needs at least, with a smaller and a larger batch."""

    #: for each way to hold weights, the bytes of its runs with both batches
    ways: tuple[tuple[tuple[int, int], ...], ...]
    batches: tuple[int, int]

    def at(self, batch: int) -> int:
        """The floor with that batch, less a few bytes where sizes of tensors are rounded up."""
        small, large = self.batches
        share = (batch - small) / (large - small)
        return min(
            max((math.ceil(a + (b - a) * share) for a, b in runs), default=0) for runs in self.ways
        )


@dataclass(frozen=True, eq=False)
class ScaledWay:
    """A way to run the step with any batch. at_home: nothing has to move if it fits as it is."""

    scale: Scale
    floors: ScaledFloors
    at_home: bool


def largest_batch(
    ways: Sequence[ScaledWay],
    has_room: Callable[[int], bool],
    planned: Callable[[Problem, bool], bool],
) -> int:
    """The largest batch with a plan, within the precision; 0 if there is none.

    has_room: True for a floor in bytes that fits. planned: True if there is a plan, given the
    problem and `at_home`.
    """

    def fitting(batch: int) -> list[ScaledWay]:
        """The ways whose floor fits, those with the most room first."""
        found = sorted((way.floors.at(batch), i) for i, way in enumerate(ways))
        return [ways[i] for floor_bytes, i in found if has_room(floor_bytes)]

    low, high = 0, 1
    while fitting(high):
        low, high = high, 2 * high
    while high - low > max(1, int(low * PRECISION)):
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle) else (low, middle)
    less = max(1, int(low * PRECISION))
    while low > 0:
        if any(planned(way.scale.at(low), way.at_home) for way in fitting(low)):
            return low
        low, less = low - less, 2 * less
    return 0
