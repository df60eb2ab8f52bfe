"""Empties the device between forward and backward, where several graphs save too much together."""

from __future__ import annotations

import torch

from offcompile.ir import Infeasible
from offcompile.run.plan.request import BOTH, EMPTIED

from .hosting import by_preference, have_left, hosted
from .plans import Plans
from .variant import Call, Variant

#: share of the budget that a graph, plus the saved activations of another one like it, may take
#: in the first step
WITH_ANOTHER = 0.75


def emptied(plans: Plans, call: Call, goes_on: bool) -> Variant | None:
    """Return a plan that lets everything saved for backward leave, if this graph is one of several
    whose saved activations together exceed the budget. None if another plan will do.

    goes_on: the graph returns something other than a loss.
    """
    hosts = have_left(plans, call)
    whole = by_preference(plans, call)[-1] if hosts else plans.variants[0]
    if not plans.facts.runs.entry.trains or BOTH in plans.in_vain:
        return None
    if not _crowded(plans, call, whole, goes_on):
        return None
    there = [v for v in plans.variants if v.kind.offload_saved and v.placement.has_any >= hosts]
    found = plans.first_within(there, call)
    if found is not None:
        return found
    if hosts or EMPTIED in plans.in_vain:
        return hosted(plans, call, BOTH)
    held = plans.held(call)
    try:
        made = plans.make(call, held, EMPTIED)
    except Infeasible:
        plans.in_vain.add(EMPTIED)
        return hosted(plans, call, BOTH)
    return made if plans.within(made, held, call) else None


def _crowded(plans: Plans, call: Call, whole: Variant, goes_on: bool) -> bool:
    """True if this graph and others together save more for backward than the budget holds."""
    runs = plans.facts.runs
    budget, books, entry = runs.budget_bytes, runs.books, runs.entry
    assert budget is not None
    needs = whole.needs_at(call.sizes)
    held, peak = plans.held(call), needs.peak_bytes
    alone = entry.has_returned and not entry.in_turn
    if alone or peak > budget:
        return False
    wanted = held + books.unmoved_bytes() + peak
    crowded = books.crowded(entry, wanted, needs.kept_bytes, budget)
    if crowded is None:
        return _may_crowd(plans, call, wanted, needs.kept_bytes if goes_on else None)
    return crowded


def _may_crowd(plans: Plans, call: Call, wanted: int, more: int | None) -> bool:
    """True if the first step had better leave room for graphs that may follow.

    A graph that gets the output of another graph is one of several, and may take half of the
    budget. A graph that does not end in a loss may be the first of several, unless another one like
    it, which saves `more` bytes, would fit with some room to spare. None: it ends in a loss.
    """
    budget = plans.facts.runs.budget_bytes
    assert budget is not None
    others = (x for i, x in enumerate(call.args) if i not in plans.facts.parameters)
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in others):
        return wanted > budget // 2
    return more is not None and wanted + more > budget * WITH_ANOTHER
