"""What a step holds on the device run by run when ops run again and nothing leaves.

The same as `pressure`, many times quicker: no copy is planned, bytes are only added up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import accumulate

from offcompile.ir import DEVICE, Problem, Recompute

from .decisions import Decisions
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
    if _has_others(problem):
        again = tuple(Recompute(*rerun) for rerun in sorted(reruns))
        return list(pressure(problem, Decisions(recomputes=again)).kept_bytes)
    order = order_of(problem, reruns)
    nbytes = {t.id: t.nbytes for t in problem.tensors}
    uses, own, lasts = problem.uses, problem.operand_bytes, problem.surviving_ids
    change = [0] * (len(order) + 1)
    last: dict[str, int] = {}
    #: tensors of which there is a copy where they began, too
    clean: set[str] = set()
    #: tensors whose first use wants what the step before left, and where it is
    first: dict[str, int] = {}
    if not problem.steady:
        last = {t.id: -1 for t in problem.tensors if t.home == DEVICE}
        clean = {t.id for t in problem.tensors if t.home not in (None, DEVICE)}
    for position, op in enumerate(order):
        for t, reads, writes in uses[op]:
            if reads or (t in lasts and t not in clean):
                before = last.get(t)
                if before is not None:
                    change[before + 1] += nbytes[t]
                    change[position] -= nbytes[t]
                elif problem.steady:
                    first[t] = position
            if writes:
                clean.discard(t)
            last[t] = position
    for t, position in first.items():  # around the end of the step
        change[last[t] + 1] += nbytes[t]
        change[0] += nbytes[t]
        change[position] -= nbytes[t]
    if not problem.steady:
        for t, position in last.items():
            if t in lasts and t not in clean:
                change[position + 1] += nbytes[t]
    return [own[op] + beside for op, beside in zip(order, accumulate(change[:-1]), strict=True)]


def _has_others(problem: Problem) -> bool:
    """Whether something is pinned in a way that needs a closer look."""
    return any(
        t.pinned and t.home is not None and (t.home != DEVICE or t.id not in problem.surviving_ids)
        for t in problem.tensors
    )
