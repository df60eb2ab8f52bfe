"""Codec rules that hold whatever the timing: the forms that a copy can possibly have."""

from __future__ import annotations

from collections.abc import Iterator

from offcompile.ir.errors import Violation
from offcompile.ir.model import DEVICE, HOST, Machine, Problem
from offcompile.ir.plan import Plan

from .order import arrives_as, executed, start_codecs

Place = tuple[str, str]  # tensor, tier
Forms = dict[Place, set[str | None]]


def check_codecs(problem: Problem, machine: Machine, plan: Plan) -> Iterator[Violation]:
    """Finds unknown codecs, missing ratios, and moves whose source never has the needed form."""
    known = True
    for move in plan.moves:
        if move.codec is None:
            continue
        where = f"move {move.id}"
        if move.codec not in machine.codec:
            known = False
            listed = ", ".join(sorted(machine.codec)) or "none"
            detail = f"no codec is named {move.codec!r}; there are: {listed}"
            yield Violation("codec", where, detail)
        elif move.codec not in problem.tensor[move.tensor].ratios:
            known = False
            detail = f"tensor {move.tensor} has no ratio for codec {move.codec}"
            yield Violation("codec", where, detail)
    if not known:
        return
    forms = _possible_forms(problem, plan)
    for move in plan.moves:
        held = forms.get((move.tensor, move.source), set())
        where = f"move {move.id}"
        if move.source == DEVICE or not held:  # no copy at all is not a matter of its form
            continue
        if move.codec is not None and move.codec not in held:
            detail = (
                f"codec {move.codec} on a move from {move.source}, where no copy of "
                f"{move.tensor} is ever compressed with it; only a move off the {DEVICE} compresses"
            )
            yield Violation("codec", where, detail)
        elif move.codec is None and None not in held:
            detail = (
                f"moves {move.tensor} plainly from {move.source}, where its copy is always "
                f"compressed ({', '.join(sorted(str(f) for f in held))}): name the codec"
            )
            yield Violation("codec", where, detail)


def _possible_forms(problem: Problem, plan: Plan) -> Forms:
    """The forms that a copy of each tensor may take on each tier: a superset of those it does."""
    forms: Forms = {}
    for place, codec in start_codecs(problem, plan).items():
        forms.setdefault(place, set()).add(codec)
    for run in executed(problem, plan):
        for tensor in run.op.writes:
            if run.tier_of(tensor) == HOST:
                forms.setdefault((tensor, HOST), set()).add(None)
    grew = True
    while grew:
        grew = False
        for move in plan.moves:
            held = forms.get((move.tensor, move.source), set())
            if move.source != DEVICE and move.codec not in held:
                continue
            there = forms.setdefault((move.tensor, move.target), set())
            if arrives_as(move) not in there:
                there.add(arrives_as(move))
                grew = True
    return forms
