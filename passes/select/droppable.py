"""Ops that may be rerun, and the recomputations needed if their outputs are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from offcompile.ir import SELF_ENDING_KINDS, Op, Problem, Recompute


@dataclass(frozen=True)
class Droppable:
    """An op that may be rerun, and the longest gap in which its outputs are not used.

    `first` and `last` are the positions, inclusive, at which the outputs are off the device.
    """

    op: str
    position: int
    first: int
    last: int
    nbytes: int
    duration_ns: int


def droppable_ops(problem: Problem) -> list[Droppable]:
    """Returns ops marked `recompute` that write only activations of their own, in order."""
    accesses: dict[str, list[int]] = {}
    writers: dict[str, list[str]] = {}
    for at, op in enumerate(problem.ops):
        for t in op.operands:
            accesses.setdefault(t, []).append(at)
        for t in op.writes:
            writers.setdefault(t, []).append(op.id)
    found = []
    for at, op in enumerate(problem.ops):
        if not op.recompute or not own_outputs(problem, op, writers):
            continue
        uses = sorted({p for t in op.writes for p in accesses[t]})
        start, end = max(
            pairwise(uses),
            key=lambda gap: gap[1] - gap[0],
            default=(at, at),
        )
        if end - start < 2:
            continue
        alive = [t for t in op.writes if accesses[t][-1] >= end]
        nbytes = sum(problem.tensor[t].nbytes for t in alive)
        if nbytes:
            duration_ns = round(1000 * op.duration_us)
            found.append(Droppable(op.id, at, start + 1, end - 1, nbytes, duration_ns))
    return found


def own_outputs(problem: Problem, op: Op, writers: dict[str, list[str]]) -> bool:
    """True if rerunning `op` changes only values that no other op writes."""
    return not set(op.reads) & set(op.writes) and all(
        problem.tensor[t].kind in SELF_ENDING_KINDS
        and problem.tensor[t].home is None
        and writers[t] == [op.id]
        for t in op.writes
    )


def recomputes_for(
    problem: Problem, droppable: Sequence[Droppable], dropped: Iterable[str]
) -> tuple[Recompute, ...]:
    """Reruns each dropped op before the first op that needs it, after the producers of its inputs.

    An input that is not dropped is simply kept until then. If an input of an op has been
    overwritten in the meantime, the op cannot be rerun: it is not dropped, and neither are ops that
    would need it.
    """
    known = {d.op: d for d in droppable}
    wanted = dict.fromkeys(name for name in dropped if name in known)
    return tuple(_Demand(problem, [known[name] for name in wanted]).reruns())


class _Demand:
    """Goes through the step once, and reruns dropped ops as their outputs are read again."""

    def __init__(self, problem: Problem, dropped: Iterable[Droppable]) -> None:
        self.problem = problem
        self.producer = {t: d for d in dropped for t in problem.op[d.op].writes}
        self.last_write: dict[str, int] = {}
        self.back: set[str] = set()

    def reruns(self) -> list[Recompute]:
        result: list[Recompute] = []
        for at, op in enumerate(self.problem.ops):
            for t in op.reads:
                d = self.producer.get(t)
                if d is not None and at > d.last and d.op not in self.back:
                    result += [Recompute(x.op, op.id) for x in self._bring(d, at)]
            for t in op.writes:
                self.last_write[t] = at
        return result

    def _bring(self, d: Droppable, at: int) -> list[Droppable]:
        """`d` and the ops that it needs, in order; empty if `d` cannot be rerun."""
        while True:
            order, broken = self._needed(d, at)
            if broken is None:
                return order
            # nothing has needed it before, so the step up to here is the same without the drop
            for t in self.problem.op[broken.op].writes:
                del self.producer[t]
            self.back.difference_update(x.op for x in order)
            if broken is d:
                return []

    def _needed(self, d: Droppable, at: int) -> tuple[list[Droppable], Droppable | None]:
        """The ops to rerun for `d`, and one of them that cannot be rerun, if any."""
        stack, order = [d], list[Droppable]()
        while stack:
            x = stack.pop()
            if x.op in self.back:
                continue
            self.back.add(x.op)
            order.append(x)
            for t in self.problem.op[x.op].reads:
                if self.last_write.get(t, -1) > x.position:
                    return order, x
                source = self.producer.get(t)
                if source is not None and source.first <= at:
                    stack.append(source)
        order.sort(key=lambda x: x.position)
        return order, None
