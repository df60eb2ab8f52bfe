"""Estimates the steps of batches that were not traced, from two that were.

Tracing takes far longer than all else that is done for a batch. An estimate only says which batch
to trace next: what a search answers was traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from offcompile.ahead.scaled import Scale, ScaledFloors
from offcompile.ir import Problem

#: the bytes that a step needs at each of its runs, in each way to run it
Needs = Callable[[Problem], tuple[list[int], ...]]


@dataclass(eq=False)
class BatchEstimates:
    """The steps of all traced batches: each whole and, if it was planned so, in pieces."""

    needs: Needs
    steps: dict[int, tuple[Problem, ...]] = field(default_factory=dict)

    def add(self, batch: int, ways: Sequence[Problem]) -> None:
        self.steps[batch] = tuple(ways)

    def largest(self, has_room: Callable[[int], bool], most: int) -> int | None:
        """The largest batch up to `most` with room for what it needs, by the two largest traced
        ones; None if these do not line up."""
        if len(self.steps) < 2:
            return None
        found = [self._scaled(scale) for scale in self._scales(*sorted(self.steps)[-2:])]
        if not found:
            return None
        return _last(lambda batch: has_room(min(way.at(batch) for way in found)), most)

    def at(self, batch: int) -> list[Problem]:
        """The step of a batch between two traced ones, in each way; empty if these do not line
        up, or if there are none."""
        below = max((b for b in self.steps if b < batch), default=None)
        above = min((b for b in self.steps if b > batch), default=None)
        if below is None or above is None:
            return []
        return [scale.at(batch) for scale in self._scales(below, above)]

    def _scales(self, small: int, large: int) -> list[Scale]:
        pairs = zip(self.steps[small], self.steps[large], strict=False)
        found = [Scale(_movable_as(b, a), b, (small, large)) for a, b in pairs]
        return [scale for scale in found if scale.lines_up]

    def _scaled(self, scale: Scale) -> ScaledFloors:
        ways = zip(self.needs(scale.small), self.needs(scale.large), strict=True)
        runs = tuple(tuple(zip(a, b, strict=True)) for a, b in ways)
        return ScaledFloors(runs, scale.batches)


def _movable_as(large: Problem, small: Problem) -> Problem:
    """The small step, in which those tensors may move that may move in the large one."""
    given = large.tensor
    tensors = (replace(given.get(t.id, t), nbytes=t.nbytes) for t in small.tensors)
    return replace(small, tensors=tuple(tensors))


def _last(holds: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that holds, if all below hold too; 0: none does."""
    low, high = 0, most + 1
    while high - low > 1:
        middle = min((low + high) // 2, max(1, 2 * low))
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
