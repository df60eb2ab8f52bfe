"""Merges tensors that a coarse grid cannot tell apart: deep nets need few columns."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

from offcompile.bounds.survey import Survey, SurveyGap
from offcompile.ir import Tensor

from .grid import Grid

#: prefix of the names of merged tensors; no id in a problem begins with it
MERGED = "\0merged "


def merged_tensors(survey: Survey, grid: Grid) -> Survey:
    """Returns the same problem, merging tensors with the same gaps in the grid's slots.

    Their columns would be interchangeable: the program of the sum is satisfied by their mean,
    weighted by size. Carrying a byte costs as little as for the cheapest of them, and among the
    ops at each end the one that leaves most time counts, so a bound stays a bound.
    """
    if any(survey.machine.tier[t].capacity_bytes is not None for t in survey.tiers):
        return survey
    groups: dict[object, list[str]] = defaultdict(list)
    for t, gaps in survey.gaps.items():
        if any(g.free for g in gaps):
            alone = survey.problem.tensor[t].nbytes == 0 or t in survey.rewriters
            alone = alone or any(_optional(survey, g) for g in gaps)
            home = survey.problem.tensor[t].home if not survey.problem.steady else None
            groups[t if alone else (home, tuple(_seen(grid, g) for g in gaps))].append(t)
    gaps_of: dict[str, tuple[SurveyGap, ...]] = dict(survey.gaps)
    carry: dict[tuple[str, str], int] = dict(survey.carry_ns)
    extra = []
    for number, members in enumerate(m for m in groups.values() if len(m) > 1):
        name = f"{MERGED}{number}"
        total = sum(survey.problem.tensor[t].nbytes for t in members)
        first = survey.problem.tensor[members[0]]
        extra.append(Tensor(name, total, first.kind, first.home))
        for lane in survey.lanes:
            carry[name, lane.name] = _least_ns(survey, members, lane.name, total)
        gaps_of[name] = tuple(
            _together(name, column)
            for column in zip(*(survey.gaps[t] for t in members), strict=True)
        )
        for t in members:
            del gaps_of[t]
            for lane in survey.lanes:
                del carry[t, lane.name]
    problem = replace(survey.problem, tensors=survey.problem.tensors + tuple(extra))
    return replace(survey, problem=problem, gaps=gaps_of, carry_ns=carry)


def _optional(survey: Survey, gap: SurveyGap) -> bool:
    ends = (i for i in (gap.before, gap.after) if i is not None)
    return any(survey.optional(i, gap.tensor) for i in ends)


def _seen(grid: Grid, gap: SurveyGap) -> tuple[object, ...]:
    """Everything that a program sees of a gap."""
    inside = grid.inside(gap)
    slots = grid.slots(gap, inside)
    last = None if gap.after is None else grid.slot_before(gap.after)
    place = (len(inside), *inside[:1].tolist(), len(slots), *slots[:1].tolist(), last)
    return (gap.kind, gap.new_value, gap.wraps, gap.free, *place)


def _least_ns(survey: Survey, members: list[str], lane: str, total: int) -> int:
    size = survey.problem.tensor
    per_byte = min(Fraction(survey.carry_ns[t, lane], size[t].nbytes) for t in members)
    return int(per_byte * total)


def _together(name: str, gaps: tuple[SurveyGap, ...]) -> SurveyGap:
    befores = [g.before for g in gaps if g.before is not None]
    afters = [g.after for g in gaps if g.after is not None]
    return replace(
        gaps[0],
        tensor=name,
        before=min(befores) if befores else None,
        after=max(afters) if afters else None,
    )
