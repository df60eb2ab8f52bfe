"""What a step holds on the device run by run when ops run again and nothing leaves.

The same as `pressure`, many times quicker: no copy is planned, bytes are only added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from itertools import accumulate

from offcompile.ir import DEVICE, Problem, Recompute
from offcompile.passes.build.decisions import Decisions

from .pressure import pressure

#: an op, and the op that it runs again before
Rerun = tuple[str, str]


def order_of(problem: Problem, reruns: Iterable[Rerun]) -> list[int]:
    """Which op each run of a step is of."""
    at = problem.op_index
    again: dict[int, list[int]] = {}
    for op, before in reruns:
        again.setdefault(at[before], []).append(at[op])
    order: list[int] = []
    for i in range(len(problem.ops)):
        if i in again:
            order += sorted(again[i])
        order.append(i)
    return order


def footprint(problem: Problem, reruns: Collection[Rerun]) -> list[int]:
    """Bytes that each run of `order_of` holds: its own, and what stays beside it."""
    if problem.once(_has_others):
        again = tuple(Recompute(*rerun) for rerun in sorted(reruns))
        return list(pressure(problem, Decisions(recomputes=again)).kept_bytes)
    order = order_of(problem, reruns)
    start, forward = problem.once(_beginnings)
    changed = min((problem.op_index[before] for _, before in reruns), default=len(problem.ops))
    walk = (forward if forward.position <= changed else start).copy()
    walk.on(order[walk.position :])
    own = problem.operand_bytes
    beside = accumulate(walk.ended())
    return [own[op] + more for op, more in zip(order, beside, strict=True)]


class _Walk:
    """A walk along the runs of a step, which notes where what stays beside them changes."""

    def __init__(self, problem: Problem) -> None:
        tensors, lasts = problem.tensors, problem.surviving_ids
        index = {t.id: i for i, t in enumerate(tensors)}
        self.steady = problem.steady
        self.nbytes = [t.nbytes for t in tensors]
        self.lasts = [t.id in lasts for t in tensors]
        #: per op: tensor, whether it is read, whether it is written
        self.uses = [[(index[t], *how) for t, *how in uses] for uses in problem.uses]
        self.position = 0
        self.change = [0]
        #: per tensor: the position of its last use
        self.last: list[int | None] = [None] * len(tensors)
        #: tensors of which there is a copy where they began, too
        self.clean: set[int] = set()
        #: tensors whose first use wants what the step before left, and where it is
        self.first: dict[int, int] = {}
        if not problem.steady:
            for i, t in enumerate(tensors):
                if t.home == DEVICE:
                    self.last[i] = -1
                elif t.home is not None:
                    self.clean.add(i)

    def copy(self) -> _Walk:
        other = copy(self)
        other.change, other.last = list(self.change), list(self.last)
        other.clean, other.first = set(self.clean), dict(self.first)
        return other

    def on(self, ops: Sequence[int]) -> None:
        """Go on over runs of these ops."""
        uses, nbytes, lasts, steady = self.uses, self.nbytes, self.lasts, self.steady
        last, clean, position = self.last, self.clean, self.position
        self.change += [0] * len(ops)
        change = self.change
        for op in ops:
            for t, reads, writes in uses[op]:
                if reads or (lasts[t] and t not in clean):
                    before = last[t]
                    if before is not None:
                        change[before + 1] += nbytes[t]
                        change[position] -= nbytes[t]
                    elif steady:
                        self.first[t] = position
                if writes:
                    clean.discard(t)
                last[t] = position
            position += 1
        self.position = position

    def ended(self) -> list[int]:
        """By how much each run's bytes beside it differ from those of the one before."""
        change, last, nbytes = self.change, self.last, self.nbytes
        for t, position in self.first.items():  # around the end of the step
            change[(last[t] or 0) + 1] += nbytes[t]
            change[0] += nbytes[t]
            change[position] -= nbytes[t]
        if not self.steady:
            for t, at in enumerate(last):
                if at is not None and self.lasts[t] and t not in self.clean:
                    change[at + 1] += nbytes[t]
        return change[:-1]


def _beginnings(problem: Problem) -> tuple[_Walk, _Walk]:
    """A walk before the first run, and one after all of forward, in which nothing runs again."""
    start = _Walk(problem)
    ops = range(len(problem.ops))
    end = next((i for i in ops if problem.ops[i].phase != "forward"), len(problem.ops))
    forward = start.copy()
    forward.on(ops[:end])
    return start, forward


def _has_others(problem: Problem) -> bool:
    """Whether something is pinned in a way that needs a closer look."""
    return any(
        t.pinned and t.home is not None and (t.home != DEVICE or t.id not in problem.surviving_ids)
        for t in problem.tensors
    )
