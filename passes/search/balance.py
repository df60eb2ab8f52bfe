"""Turns loads into direct accesses where the lane is the bottleneck.

A step that streams its weights takes as long as its lane is busy, and compute waits meanwhile. A
read of a weight on the host can be made in place instead: the op takes longer, and the lane carries
less. Those reads are changed that add the least compute per lane time saved, spread over the whole
step, and only as many as make lane and compute equally busy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from offcompile.ir import DEVICE, HOST, Move, Plan
from offcompile.passes.build.lanes import LaneClock
from offcompile.passes.select.gap_set import GapSet, Prices

from .program_variant import Choices, ProgramVariant, may_access
from .search import SearchState

#: below this ratio to compute the lane is not the bottleneck
WORTH = 1.02
#: relative difference below which costs count as equal
ALIKE = 0.02
NS_PER_US = 1000


@dataclass(frozen=True)
class _Read:
    """A load for a single op that could read the host's copy instead."""

    position: int
    op: str
    tensor: str
    lane_us: float
    more_us: float

    @property
    def price(self) -> float:
        return self.more_us / self.lane_us


def balanced(state: SearchState) -> tuple[ProgramVariant, GapSet] | None:
    """Returns the same choices with some loads made direct; None if that gains nothing."""
    variant = state.variant
    took_us = {s.id: (s.end_ns - s.start_ns) / NS_PER_US for s in state.timeline.spans}
    loads = [m for m in state.plan.moves if m.target == DEVICE]
    lane_us = sum(took_us[m.id] for m in loads)
    compute_us = LaneClock.unhindered(variant.program).period
    if lane_us <= compute_us * WORTH:
        return None
    reads = _reads(variant, state.plan, loads, took_us)
    chosen = _enough(reads, lane_us - compute_us)
    if not chosen:
        return None
    directs = variant.choices.directs | {(r.op, r.tensor) for r in chosen}
    choices = Choices(directs, variant.choices.recomputes, variant.choices.hosted)
    made, cover = variant.with_choices(choices, state.cover)
    return (made, cover) if cover.repair(made.capacity, Prices()) else None


def _reads(
    variant: ProgramVariant, plan: Plan, loads: Sequence[Move], took_us: Mapping[str, float]
) -> list[_Read]:
    """Returns loads of weights from the host that only one op needs."""
    program, problem = variant.program, variant.problem
    dropped = {(d.tensor, d.after) for d in plan.drops if d.tier == DEVICE}
    found = []
    for load in loads:
        t, name = load.tensor, load.ready_before
        if problem.tensor[t].kind != "weight" or load.source != HOST:
            continue
        if name is None or name not in problem.op:
            continue
        op, at = problem.op[name], program.position[name]
        last = program.accesses[t][-1].position == at and not problem.steady
        alone = (t, name) in dropped or last
        if not alone or t in op.writes or t not in may_access(problem, op):
            continue
        lane_us, more_us = took_us[load.id], op.direct[t] - op.duration_us
        if lane_us + more_us > 0:
            found.append(_Read(at, name, t, lane_us, more_us))
    return found


def _enough(reads: Sequence[_Read], excess_us: float) -> list[_Read]:
    """Returns the cheapest reads that remove the excess, evenly spread among equal costs."""
    chosen: list[_Read] = []
    for _, same in groupby(sorted(reads, key=lambda r: r.price), key=_Steps()):
        group = sorted(same, key=lambda r: r.position)
        gained = sum(r.lane_us + r.more_us for r in group)
        if gained <= excess_us:
            chosen += group
            excess_us -= gained
            continue
        count = int(len(group) * excess_us / gained)
        chosen += [group[(2 * k + 1) * len(group) // (2 * count)] for k in range(count)]
        break
    return chosen


class _Steps:
    """Numbers prices given in rising order; prices that count as equal get the same number."""

    def __init__(self) -> None:
        self.number, self.most = 0, float("-inf")

    def __call__(self, read: _Read) -> int:
        if read.price > self.most:
            self.number += 1
            self.most = read.price + ALIKE * abs(read.price)
        return self.number
