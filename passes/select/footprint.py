"""Device memory of a step, run by run, if ops are rerun and nothing is evicted.

Gives the same result as `pressure`, many times faster: it plans no copies and only adds up bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from itertools import accumulate

from offcompile.ir import DEVICE, Problem, Recompute
from offcompile.passes.build.decisions import Decisions

from .pressure import pressure

#: (op, the op before which it is rerun)
Rerun = tuple[str, str]


def order_of(problem: Problem, reruns: Iterable[Rerun]) -> list[int]:
    """Returns the op index of each run of a step."""
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
    """Returns the bytes held at each run of `order_of`: its operands and tensors kept meanwhile."""
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


class _FootprintWalk:
    """A walk along the runs of a step that records changes in the bytes kept alongside them."""

    def __init__(self, problem: Problem) -> None:
        tensors, lasts = problem.tensors, problem.surviving_ids
        index = {t.id: i for i, t in enumerate(tensors)}
        self.steady = problem.steady
        self.nbytes = [t.nbytes for t in tensors]
        self.lasts = [t.id in lasts for t in tensors]
        #: per op: (tensor, is read, is written)
        self.uses = [[(index[t], *how) for t, *how in uses] for uses in problem.uses]
        self.position = 0
        self.change = [0]
        #: per tensor: the position of its last use
        self.last: list[int | None] = [None] * len(tensors)
        #: tensors that still have a valid copy at their home
        self.clean: set[int] = set()
        #: tensors whose first use needs the value of the previous step, and the position of that
        #: use
        self.first: dict[int, int] = {}
        if not problem.steady:
            for i, t in enumerate(tensors):
                if t.home == DEVICE:
                    self.last[i] = -1
                elif t.home is not None:
                    self.clean.add(i)

    def copy(self) -> _FootprintWalk:
        other = copy(self)
        other.change, other.last = list(self.change), list(self.last)
        other.clean, other.first = set(self.clean), dict(self.first)
        return other

    def on(self, ops: Sequence[int]) -> None:
        """Continues over runs of these ops."""
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
        """Returns the change in kept bytes from each run to the next."""
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


def _beginnings(problem: Problem) -> tuple[_FootprintWalk, _FootprintWalk]:
    """Returns a walk before the first run, and one after all of forward, without reruns."""
    start = _FootprintWalk(problem)
    ops = range(len(problem.ops))
    end = next((i for i in ops if problem.ops[i].phase != "forward"), len(problem.ops))
    forward = start.copy()
    forward.on(ops[:end])
    return start, forward


def _has_others(problem: Problem) -> bool:
    """True if a pinned tensor needs the slower computation."""
    return any(
        t.pinned and t.home is not None and (t.home != DEVICE or t.id not in problem.surviving_ids)
        for t in problem.tensors
    )
