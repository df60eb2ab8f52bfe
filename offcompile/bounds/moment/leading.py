"""The least time until an op ends: loads that come before an op, and the ops that come after them.

A moment's prices weigh loads against ops, as if both could fill all of the time before it. But an
op waits for the loads of all that was read up to it, and the ops from it on follow one by one.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from offcompile.bounds.survey import Floats, Survey
from offcompile.ir import DEVICE

from .crossings import Crossings
from .ways import IN_PLACE, Serving


def ends_ns(survey: Survey, crossings: Crossings, least: Floats) -> Floats:
    """The earliest end of each op after the start of a step that is not steady.

    least: the time that each op takes of the compute lane.
    """
    best = np.cumsum(least)
    for column in range(1, 1 + len(crossings.ins)):
        best = np.maximum(best, _ends_after(survey, crossings, least, column))
    return best


def _ends_after(survey: Survey, crossings: Crossings, least: Floats, column: int) -> Floats:
    """The same by one lane: what it carries if all that can takes another way."""
    before: dict[int, float] = defaultdict(float)  # op → loads that end before it starts
    during: dict[int, float] = defaultdict(float)  # and those, or accesses in place, of this op
    for t, gaps in survey.gaps.items():
        tensor = survey.problem.tensor[t]
        first = gaps[0] if gaps else None
        if first is None or first.before is not None or first.kind != "live":
            continue
        if tensor.home in (None, DEVICE) or tensor.pinned or first.after is None:
            continue
        op = first.after
        if survey.host_ns[op] is not None:
            continue  # an update on the host needs no load
        ways = crossings.into(t)
        if not survey.optional(op, t):
            before[op] += _least(ways, column)
            continue
        in_place = crossings.or_in_place(ways, t, (op,))
        during[op] += min(_least(ways, column), float(in_place.times[IN_PLACE]))
        before[op + 1] += _least(in_place, column)
    found, loaded, end = np.zeros(survey.n_ops), 0.0, 0.0
    for op in range(survey.n_ops):
        loaded += before[op]
        start = max(end, loaded)
        found[op] = end = start + float(least[op])
        if during[op]:
            found[op] = end = max(end, loaded + during[op] + float(least[op]))
    return found


def _least(ways: Serving, column: int) -> float:
    """The least time that the lane is busy for a tensor; 0 if there is a way around it."""
    busy = [
        (ns if lane == column else 0.0) + (float(ways.beside[column]) if lane == IN_PLACE else 0.0)
        for lane, ns in enumerate(ways.times)
        if np.isfinite(ns)
    ]
    return min(busy, default=0.0)
