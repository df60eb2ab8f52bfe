"""Constraints of the accesses at both ends of a gap."""

from __future__ import annotations

from collections.abc import Mapping

from offcompile.bounds.survey import Survey, SurveyGap
from offcompile.ir import HOST

from .stay import GapColumns
from .times import Times


def remade_on_host(survey: Survey, tensor: str) -> bool:
    """True if a recomputation may write the tensor on the host."""
    ops = survey.problem.ops
    return any(tensor in ops[op].direct for op in survey.rewriters.get(tensor, ()))


def spared(times: Times, gap: SurveyGap, limited: bool) -> list[int]:
    """Host updates that, run early or late, make any copy of the gap's value unnecessary."""
    found = []
    after = None if gap.after is None else times.on_host.get(gap.after)
    if after is not None and (limited or not _reads(times, gap.after, gap.tensor)):
        found.append(after)
    before = None if gap.before is None else times.on_host.get(gap.before)
    if before is not None and limited and gap.new_value:
        found.append(before)
    return found


def ends(times: Times, stay: GapColumns) -> None:
    """The access after the gap: it needs a device copy, or a host copy to be accessed in place."""
    gap, add = stay.gap, times.rows.add
    if gap.kind == "late":
        return
    remade = [(stay.ever, -1.0)] if remade_on_host(times.survey, gap.tensor) else []
    off_device = [(int(levels[-1]), -1.0) for levels in stay.held.values()]
    if gap.kind == "live" and gap.after is not None:
        there = [*stay.presence, *times.absent(gap.after, gap.tensor)]
        add(-1.0, *((c, -1.0) for c in there))
        in_place = times.in_place.get((gap.after, gap.tensor))
        if in_place is not None:
            on_host = stay.kept.get(HOST, stay.held[HOST])
            add(0.0, (in_place, 1.0), (int(on_host[-1]), -1.0), *remade)
    update = None if gap.after is None else times.on_host.get(gap.after)
    reads = _reads(times, gap.after, gap.tensor)
    if gap.kind == "live" and gap.tensor in times.survey.rewriters:
        add(0.0, (int(stay.load[-1]), 1.0), *off_device, *remade)
    else:
        excused = [(update, -1.0)] if update is not None and not reads else []
        add(-1.0, (stay.stays, -1.0), *off_device, *excused)
    if update is not None and reads and _writes(times, gap.after, gap.tensor):
        late = times.carry_late(gap.tensor)
        add(0.0, (update, 1.0), (int(stay.held[HOST][-1]), -1.0), (late, -1.0), *remade)


def begins(times: Times, stay: GapColumns, ended: Mapping[tuple[str, int], GapColumns]) -> None:
    """The access before the gap, if it may have needed no device copy."""
    gap, add = stay.gap, times.rows.add
    op = gap.before
    if op is None or not times.survey.optional(op, gap.tensor):
        return
    update = times.on_host.get(op)
    before = ended.get((gap.tensor, op))
    if gap.new_value:
        in_place = times.in_place.get((op, gap.tensor))
        terms = [] if in_place is None else [(in_place, 1.0)]
        if update is not None and before is not None and before.gap.kind == "live":
            # the host may have updated it early, and the new value been loaded since
            terms += [(update, 1.0), (int(before.load[-1]), -1.0)]
        add(1.0, (stay.stays, 1.0), *terms)
        return
    if before is not None:
        add(0.0, (stay.stays, 1.0), *((c, -1.0) for c in before.presence))
    if update is not None:
        # read on the host before the next op that touches it, and within the step
        last = stay.frame.before_boundary if gap.wraps else -1
        remade = [(stay.ever, -1.0)] if remade_on_host(times.survey, gap.tensor) else []
        add(0.0, (update, 1.0), (int(stay.held[HOST][last]), -1.0), *remade)


def _reads(times: Times, op: int | None, tensor: str) -> bool:
    return op is not None and tensor in times.survey.problem.ops[op].reads


def _writes(times: Times, op: int | None, tensor: str) -> bool:
    return op is not None and tensor in times.survey.problem.ops[op].writes
