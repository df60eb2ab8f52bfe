"""Finds the plan that a call runs: `LADDER` lists the candidates in order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from offcompile.ir import FORWARD, Infeasible
from offcompile.ir.units import show_bytes
from offcompile.planning.footprint import Footprint, NeedsBySize
from offcompile.report.log import log_decision
from offcompile.run.accounts.other_optimizers import watch_steps
from offcompile.run.plan.contract import BOTH, EMPTIED, HOSTED, USUAL, PlanKind, PlanRequest
from offcompile.runtime.memory.blocks import round_up
from offcompile.runtime.moves.weights import is_there_by_plan

from .plans import MOST_VARIANTS, Call, Plans, Variant

#: share of the budget that a graph, plus the saved activations of another one like it, may take
#: in the first step
WITH_ANOTHER = 0.75
#: share of the budget that graphs which run between a graph's halves may take, so that its plan
#: leaves it to them; if they take more, the keeper decides what moves
MOST_AMID = 0.5
#: what a plan leaves to others is counted in such parts of the budget
OUTSIDE_PARTS = 64


def make_first(plans: Plans, call: Call) -> None:
    """Make the first plan, for the sizes that Dynamo traced. Raises `Infeasible`."""
    watch_steps()
    plans.facts.runs.usage.invalidate()
    plans.look_at_weights(call)
    held = plans.likely_held(call)
    try:
        plans.make(call, held, instead=partial(_emptied_at_once, plans, call))
    except Infeasible:
        if plans.surely_held(call) < held or plans.states_give_way(call):
            make_first(plans, call)
        elif on_host(plans, call) is None:
            raise


def choose(plans: Plans, call: Call) -> Variant:
    """Return the newest plan within the budget for this call; make one if needed."""
    if plans.facts.runs.budget_bytes is None:
        return plans.variants[-1]
    return next(made for way in LADDER if (made := way(plans, call)) is not None)


# --- the candidates: None if they do not apply --------------------------------------------------


def last_run(plans: Plans, call: Call) -> Variant | None:
    """Inside a backward pass, keep the plan of the last run, even if it exceeds the room:
    checkpoint expects a recomputed forward to save the same tensors as the first time."""
    if torch._C._current_graph_task_id() == -1:
        return None
    sizes, variant = plans.ran.get(call.parameters, (None, None))
    return variant if sizes == call.sizes else None


def follow_weights(plans: Plans, call: Call) -> None:
    """Make a plan with all weights on the host, to choose from below, if weights of the call left
    to make room for others and no plan hosts any."""
    hosts = HOSTED in plans.in_vain or any(v.placement.has_any for v in plans.variants)
    if not hosts and not plans.facts.runs.usage.sent.isdisjoint(call.parameters.ids):
        on_host(plans, call)


def around(plans: Plans, call: Call) -> Variant | None:
    """Take a plan of the usual kind that leaves their room to all that runs between its halves: to
    small graphs, such as that of a loss."""
    runs, took = plans.facts.runs, _held_amid(plans, call)
    if took is None:
        return None
    leaving = [v for v in plans.variants if _leaves(plans, v, took, call)]
    found = plans.first_within(leaving, call)
    if found is not None:
        return found
    part = outside_part(plans)
    kind = USUAL._replace(outside_bytes=round_up(took, part))
    if kind in plans.in_vain or len(plans.variants) > MOST_VARIANTS // 2:
        return None
    before, plans.outside_bytes = plans.outside_bytes, kind.outside_bytes
    plans.look_at_weights(call)
    held = plans.held(call)
    with suppress(Infeasible):
        made = plans.make(call, held, explains=False)
        if plans.within(made, held, call):
            if took >= part:
                took_by = f"{show_bytes(took)} that graphs between forward and backward take"
                plans.facts.profile.note(f"planned again with room for {took_by}")
                log_decision(runs.name, plans.facts.profile.said[-1])
            return made
    plans.outside_bytes = before
    plans.in_vain.add(kind)
    return None


def emptied(plans: Plans, call: Call) -> Variant | None:
    """Take a plan that lets everything saved for backward leave, if this graph is one of several
    whose saved activations together exceed the budget; with weights on the host if need be."""
    hosts = _have_left(plans, call)
    alone = _by_preference(plans, call) if hosts else []
    whole = alone[-1].needs_at(call.sizes) if alone else plans.whole_at(call.sizes)
    if not plans.facts.runs.entry.trains or BOTH in plans.in_vain:
        return None
    if not _crowded(plans, call, whole):
        return None
    there = [v for v in plans.variants if v.kind.offload_saved and v.placement.has_any >= hosts]
    if not hosts and (lighter := _lighter(plans, call, there)) is not None:
        return lighter
    there.sort(key=lambda variant: variant.kind.ns_per_byte)
    found = plans.first_within(there, call)
    if found is not None:
        return found
    if not hosts and EMPTIED not in plans.in_vain:
        held = plans.held(call)
        try:
            made = plans.make(call, held, EMPTIED, explains=False)
        except Infeasible:
            plans.in_vain.add(EMPTIED)
        else:
            return made if plans.within(made, held, call) else None
    return on_host(plans, call, BOTH)


def known(plans: Plans, call: Call) -> Variant | None:
    """Take a plan at hand that fits."""
    newest, preferred = plans.variants[-1], _by_preference(plans, call)
    quick = preferred[:1] == [newest] and newest.knows_needs_at(call.sizes)
    if quick and plans.within(newest, plans.facts.runs.usage.most_held(), call):
        return newest
    return plans.first_within(preferred, call)


def new(plans: Plans, call: Call) -> Variant | None:
    """Make a plan for what is held beside now; if there is none, with all weights on the host."""
    plans.look_at_weights(call)
    if (made := _with_outside(plans, call)) is not None:
        return made
    try:
        return plans.make(call, plans.held(call))
    except Infeasible:
        if plans.states_give_way(call):
            return new(plans, call)
        found = on_host(plans, call)
        if found is None:
            raise
        return found


#: the order in which candidates are tried for a call
LADDER: tuple[Callable[[Plans, Call], Variant | None], ...] = (
    last_run,
    follow_weights,
    around,
    emptied,
    known,
    new,
)

# --- parts of them ------------------------------------------------------------------------------


def outside_part(plans: Plans) -> int:
    """One of the parts of the budget in which plans leave room to others."""
    budget = plans.facts.runs.budget_bytes
    assert budget is not None
    return max(1, budget // OUTSIDE_PARTS)


def encloses(plans: Plans, variant: Variant, call: Call) -> bool:
    """True if the plan leaves their room to all graphs that run before its backward."""
    took = _held_amid(plans, call)
    return took is not None and _leaves(plans, variant, took, call)


def _with_outside(plans: Plans, call: Call) -> Variant | None:
    """Make a plan with room for what the program itself held between the halves of this graph so
    far, such as its loss. None if that is known, or little, or if there is no such plan."""
    runs, before = plans.facts.runs, plans.outside_bytes
    if runs.budget_bytes is None or runs.entry.in_turn or plans.agreement.planned_together:
        return None
    took, part = call.parameters.gap_peaks.most_bytes((FORWARD, call.sizes)), outside_part(plans)
    if took < max(part, before):
        return None
    plans.outside_bytes = round_up(took, part)
    try:
        made = plans.make(call, plans.held(call), explains=False)
    except Infeasible:
        plans.outside_bytes = before
        return None
    said = f"between forward and backward the program itself held {show_bytes(took)}"
    plans.facts.profile.note(f"{said}; planned again with that much room")
    log_decision(runs.name, plans.facts.profile.said[-1])
    return made


def _leaves(plans: Plans, variant: Variant, nbytes: int, call: Call) -> bool:
    """True if the plan leaves so much to others at its turn, on purpose or because the budget has
    that much to spare."""
    budget, needs = plans.facts.runs.budget_bytes, variant.needs_at(call.sizes)
    if budget is None or not variant.kind.is_usual:
        return False
    spare_bytes = budget - plans.held(call) - needs.standing_bytes - needs.kept_bytes
    return nbytes <= max(variant.kind.outside_bytes, spare_bytes)


def _held_amid(plans: Plans, call: Call) -> int | None:
    """The bytes that others hold between the halves of this call; None if that was not seen yet, if
    it is much, or if a graph that runs around this one has no such plan."""
    runs = plans.facts.runs
    entry, budget = runs.entry, runs.budget_bytes
    if budget is None or not entry.in_turn or not entry.trains or entry.bindings > 1:
        return None
    if plans.agreement.planned_together:
        return None
    took = call.parameters.gap_peaks.amid_bytes(call.sizes)
    if took is None or took > budget * MOST_AMID or not runs.usage.all_enclose():
        return None
    return took if runs.usage.sent.isdisjoint(call.parameters.ids) else None


def _lighter(plans: Plans, call: Call, there: Sequence[Variant]) -> Variant | None:
    """Return a plan that saves as little for backward as the plan of the whole step wants of this
    call (`StepPlanner`); None if it wants nothing, or if there is none within the budget."""
    price = call.parameters.ns_per_byte
    if not price:
        return None
    found = [v for v in there if v.kind.ns_per_byte == price]
    held = plans.held(call)
    if not found:
        try:
            found = [plans.make(call, held, EMPTIED._replace(ns_per_byte=price), explains=False)]
        except Infeasible:
            call.parameters.ns_per_byte = 0.0
            return None
    return found[0] if plans.within(found[0], held, call) else None


def on_host(plans: Plans, call: Call, kind: PlanKind = HOSTED) -> Variant | None:
    """Return a plan with all weights of this call on the host, and send weights of as few other
    calls as possible there. None if that does not free enough."""
    usage, entry = plans.facts.runs.usage, plans.facts.runs.entry
    others = usage.others(entry, call.parameters)
    if not (others or kind.offload_saved) or kind in plans.in_vain:
        return None
    for variant in plans.variants:
        if variant.kind == kind and _have_leave(plans, variant, others, call):
            return variant
    held = plans.held(call)
    sizes = [sum(map(usage.holdings.takes, other)) for other in others]
    sizes = [nbytes for nbytes in sizes if nbytes]
    for count in _doubling(len(sizes)):
        with suppress(Infeasible):
            room_taken = max(0, held - sum(sizes[:count]))
            made = plans.make(call, room_taken, kind, explains=False)
            break
    else:
        plans.in_vain.add(kind)
        return None
    if _have_leave(plans, made, others, call):
        return made
    try:  # their small weights do not leave
        made = plans.make(call, plans.held(call), kind, explains=False)
    except Infeasible:
        plans.in_vain.add(kind)
        return None
    return made if plans.within(made, plans.held(call), call) else None


def _by_preference(plans: Plans, call: Call) -> list[Variant]:
    """List the plans without an empty turn: those that move nothing first, then the newest first.

    Once a plan has put weights on the host, they and the plan stay. If no weight of the call is
    on the host, the plans that leave weights on the device come first.
    """
    newest = plans.variants[-1]
    found = [v for v in reversed(plans.variants) if not v.kind.offload_saved]
    if len(found) > 1 and newest.moves and not newest.placement.has_any:
        found.sort(key=lambda v: v.moves)
    if len(found) > 1 and any(v.placement.has_any for v in found):
        left = _have_left(plans, call)
        found.sort(key=lambda v: v.placement.has_any != left)
    return found


def _have_left(plans: Plans, call: Call) -> bool:
    """True if weights of the call are on the host because some plan has put them there."""
    return any(is_there_by_plan(call.args[i]) for i in sorted(plans.facts.parameters))


def _have_leave(
    plans: Plans, variant: Variant, others: Sequence[Sequence[torch.Tensor]], call: Call
) -> bool:
    """Send weights of other calls to the host, call by call, until `variant`, which has the weights
    of this call there, fits. Return True if it fits."""
    usage = plans.facts.runs.usage
    for other in others:
        if plans.within(variant, plans.held(call), call):
            break
        variant.placement.place_alike(call.args, other)
        usage.holdings.expect_on_host(other)
        usage.sent.update(map(id, other))
        usage.invalidate()
    return plans.within(variant, plans.held(call), call)


def _emptied_at_once(
    plans: Plans, call: Call, request: PlanRequest, needs: NeedsBySize
) -> PlanRequest | None:
    """Ask for a plan that lets everything saved leave, in place of the first plan, if `emptied`
    would take one for this call anyway: the first would be compiled in vain."""
    facts, entry = plans.facts, plans.facts.runs.entry
    if facts.runs.budget_bytes is None or not entry.trains or _have_left(plans, call):
        return None
    if not facts.runs.usage.sent.isdisjoint(call.parameters.ids):
        return None
    if not _crowded(plans, call, needs.at(call.sizes)):
        return None
    held = plans.held(call)
    return replace(request, kind=EMPTIED, held_bytes=held, explains=False, states=None)


def _crowded(plans: Plans, call: Call, needs: Footprint) -> bool:
    """True if this graph and others together save more for backward than the budget holds; alone it
    has these needs."""
    runs = plans.facts.runs
    budget, usage, entry = runs.budget_bytes, runs.usage, runs.entry
    assert budget is not None
    held, peak = plans.held(call), needs.peak_bytes
    alone = entry.has_returned and not entry.in_turn
    if alone or peak > budget:
        return False
    wanted = held + usage.unmoved_bytes() + peak
    crowded = usage.crowded(entry, wanted, needs.kept_bytes, budget)
    if crowded is None:
        return _may_crowd(plans, call, wanted, needs.kept_bytes)
    return crowded


def _may_crowd(plans: Plans, call: Call, wanted: int, more: int) -> bool:
    """True if the first step had better leave room for graphs that may follow.

    A graph that gets the output of another graph is one of several, and may take half of the
    budget. A graph that does not end in a loss may be the first of several, unless another one like
    it, which saves `more` bytes, would fit with some room to spare.
    """
    budget = plans.facts.runs.budget_bytes
    assert budget is not None
    others = (x for i, x in enumerate(call.args) if i not in plans.facts.parameters)
    if any(isinstance(x, torch.Tensor) and x.requires_grad for x in others):
        return wanted > budget // 2
    return plans.goes_on and wanted + more > budget * WITH_ANOTHER


def _doubling(most: int) -> list[int]:
    """0, 1, 2, 4, … and `most`."""
    powers = itertools.takewhile(lambda n: n < most, (1 << k for k in itertools.count()))
    return list(dict.fromkeys([0, *powers, most]))
