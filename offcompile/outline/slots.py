"""Cuts a step into slots of about equal compute time."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from offcompile.ir import Op, Problem

#: slots of a step; one more follows its last op, for what is still under way
SLOTS = 24


@dataclass(frozen=True)
class Slots:
    #: the slot of each op, by its position
    of_op: tuple[int, ...]
    #: the slot after the last op
    tail: int
    #: the slot that begins nearest to each op's end
    after_op: tuple[int, ...]
    #: compute time of a slot
    us: float

    @property
    def count(self) -> int:
        return self.tail + 1


def cut(problem: Problem) -> Slots:
    times = [0.0 if is_update(op) else op.duration_us for op in problem.ops]
    total = sum(times) or 1.0
    ends = list(accumulate(times))
    middles = (end - us / 2 for end, us in zip(ends, times, strict=True))
    return Slots(
        tuple(min(SLOTS - 1, int(at / total * SLOTS)) for at in middles),
        SLOTS,
        tuple(round(at / total * SLOTS) for at in ends),
        total / SLOTS,
    )


def is_update(op: Op) -> bool:
    """True if the op is an update that either side may run, so that it belongs to no slot."""
    return op.phase == "update" and op.host_duration_us is not None
