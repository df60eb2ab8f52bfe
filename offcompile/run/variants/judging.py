"""Replaces a plan if the steps so far call for it: by a new one, or by the one before."""

from __future__ import annotations

import torch

from offcompile.ir import FORWARD, Infeasible
from offcompile.ir.units import show_bytes
from offcompile.report.log import log_decision, warn
from offcompile.run.accounts.other_optimizers import states_beside
from offcompile.run.plan.plan_graph import plan_again
from offcompile.run.ranks.meeting import Ballot
from offcompile.run.trial import MANY_TRIMS
from offcompile.runtime.memory.blocks import round_up
from offcompile.runtime.moves.registry import lanes_moved
from offcompile.runtime.states.updates import is_refused

from .ladder import choose, outside_part
from .plans import Call, Plans, Variant

#: ranks that have planned a graph together judge its plan at this call, and whenever the number of
#: calls has doubled
FIRST_BALLOT = 4
#: the first that comes after a step of the optimizer
SECOND_CALL = 2
#: the first by which refused offers of gradients are known to be refused for good
OFFERS_KNOWN = 6
#: and once it was measured so many times
OFTEN_ENOUGH = 2
#: an excess over the budget counts in such steps
OVER_STEP_BYTES = 1 << 20
#: plans leave no more than this part of the budget free for what runs took beyond it
MOST_LACKING = 8


def judged(plans: Plans, variant: Variant, call: Call) -> Variant:
    """Return the plan to run after what the steps so far have shown."""
    if torch._C._current_graph_task_id() != -1:  # a recomputed forward is no new step
        return variant
    plans.calls += 1
    if plans.calls == SECOND_CALL:
        _tell_of_states(plans, variant, call)
    if plans.facts.runs.over_bytes:
        variant = _within_budget(plans, variant, call)
    variant = _with_room_outside(plans, variant, call)
    if plans.calls == OFFERS_KNOWN and variant.offers and not plans.agreement.planned_together:
        variant = _without_refused(plans, variant, call)
    if plans.agreement.planned_together:
        return _judged_together(plans, variant, call)
    plans.shown = _shown(plans, variant) or plans.shown
    if plans.shown and not _on_trial(plans, variant):
        plans.shown = False
        return _replanned(plans, variant, call)
    return _tried(plans, variant, call)


def _tell_of_states(plans: Plans, variant: Variant, call: Call) -> None:
    """Say so if states that other optimizers hold beside the plan go beyond the budget."""
    facts = plans.facts
    budget, weights = facts.runs.budget_bytes, [call.args[i] for i in sorted(facts.parameters)]
    states = states_beside(weights)
    if budget is None or facts.options.memory is None or not states:
        return
    needed = variant.needs_at(call.sizes).peak_bytes + plans.held(call) + states.total()
    if needed > budget:
        whose = " and ".join(states)
        text = f"{whose} holds {show_bytes(states.total())} of states on the device, which the"
        text += f" budget does not count: with them a step takes {show_bytes(needed)}. Set memory"
        text += " lower by so much, or use offcompile.optim, whose states count"
        facts.profile.note(text)
        log_decision(facts.runs.name, text)


def _within_budget(plans: Plans, variant: Variant, call: Call) -> Variant:
    """Return a plan for less than the budget, after runs have taken more than it."""
    runs = plans.facts.runs
    over, runs.over_bytes = round_up(runs.over_bytes, OVER_STEP_BYTES), 0
    found = f"a step took {show_bytes(over)} more than the budget, for libraries' workspaces or for"
    found += " values that the compiler keeps"
    budget, before = runs.budget_bytes, plans.lacking_bytes
    assert budget is not None
    if not plans.agreement.planned_together and before < budget // MOST_LACKING:
        plans.lacking_bytes += over
        made = _in_place_of(plans, variant, call, f"{found}: planned again for so much less")
        if made is not None:
            return made
        plans.lacking_bytes = before
    warn(f"{runs.name}: {found}. Set memory to {show_bytes(budget - over)} to stay within it.")
    return variant


def _with_room_outside(plans: Plans, variant: Variant, call: Call) -> Variant:
    """Return a plan that leaves room for what the program itself held between forward and backward
    the last times, such as its loss and the gradient of it."""
    runs = plans.facts.runs
    place, peaks = (FORWARD, call.sizes), call.parameters.gap_peaks
    took, budget = peaks.most_bytes(place), runs.budget_bytes
    if budget is None or runs.entry.in_turn or not variant.kind.is_usual:
        return variant
    needs = variant.needs_at(call.sizes)
    held = plans.held(call) + needs.standing_bytes + needs.kept_bytes
    over, before = held + took - budget, plans.outside_bytes
    part = outside_part(plans)
    kind = variant.kind._replace(outside_bytes=round_up(took, part))
    known = kind.outside_bytes <= variant.kind.outside_bytes
    known |= any(other.outside_bytes for other in plans.in_vain)
    if known or over <= 0 or took < part or peaks.times(place) < OFTEN_ENOUGH:
        return variant
    found = f"between forward and backward the program itself held {show_bytes(took)}, for its loss"
    found += f" or other tensors of its own: {show_bytes(over)} more than the budget left"
    if not plans.agreement.planned_together:
        plans.outside_bytes = kind.outside_bytes
        said = f"{found}; planned again with that much room"
        made = _in_place_of(plans, variant, call, said)
        if made is not None:
            return made
        plans.outside_bytes = before
    plans.in_vain.add(kind)
    warn(
        f"{runs.name}: {found}. Set memory to {show_bytes(budget + over)}, or move the"
        " loss into the compiled function."
    )
    return variant


def _in_place_of(plans: Plans, variant: Variant, call: Call, said: str) -> Variant | None:
    """Plan again, and give up this plan for the new one; note why. None if there is no other."""
    plans.look_at_weights(call)
    try:
        made = plans.make_again(call, variant.kind)
    except Infeasible:
        return None
    plans.facts.profile.note(said)
    log_decision(plans.facts.runs.name, plans.facts.profile.said[-1])
    plans.variants.remove(variant)
    return made


def _without_refused(plans: Plans, variant: Variant, call: Call) -> Variant:
    """On a device, return a plan without the offers that are always refused, as where a graph runs
    twice before one backward: each costs a copy to the host."""
    on_cpu = plans.facts.target.device.type == "cpu"
    refused = [i for i in plans.taken.updated if is_refused(call.args[i])]
    if on_cpu or not refused:
        return variant
    plans.look_at_weights(call)
    found = f"{len(refused)} gradients were offered to the optimizer in vain"
    try:
        made = plans.make_again(call, variant.kind)
    except Infeasible as error:
        plans.facts.profile.note(f"{found}; the plan stays, since for another one: {error.reason}")
        return variant
    plans.facts.profile.note(f"{found}: planned again without")
    log_decision(plans.facts.runs.name, plans.facts.profile.said[-1])
    plans.variants.remove(variant)
    return made


def _with_room(plans: Plans, variant: Variant, call: Call) -> Variant:
    """Return a plan that leaves holes all the room that they want."""
    plans.facts.profile.lacks_room = True
    plans.look_at_weights(call)
    found = "free memory went back to the system in every step, for lack of room for holes"
    try:  # of the same kind: graphs that follow count on what this one lets leave
        made = plans.make_again(call, variant.kind)
    except Infeasible as error:  # does not fit in what is free just now
        plans.facts.profile.note(f"{found}; the plan stays, since for another one: {error.reason}")
        return variant
    plans.facts.profile.note(f"{found}: planned again with more")
    log_decision(plans.facts.runs.name, plans.facts.profile.said[-1])
    assert variant.planned is not None
    plans.trial.replaced(variant.planned.report)
    return made


def _judged_together(plans: Plans, variant: Variant, call: Call) -> Variant:
    """Return the plan to run on all ranks: at a few calls, the same on each, rank 0 judges for all.
    A plan that one rank alone replaced would part it from the others."""
    plans.shown = _shown(plans, variant) or plans.shown
    if plans.calls < FIRST_BALLOT or plans.calls & (plans.calls - 1):
        return variant
    ballot = plans.agreement.ballot(plans.calls)
    assert ballot is not None
    if ballot.group.rank != ballot.leader:
        if ballot.offers_another():
            plans.look_at_weights(call)
            return plans.make(call, plans.held(call), meeting=ballot)
        return _tried(plans, variant, call, ballot)
    try:
        if plans.shown:
            plans.shown = False
            return _replanned(plans, variant, call, ballot)
        return _tried(plans, variant, call, ballot)
    finally:
        ballot.end()


def _shown(plans: Plans, variant: Variant) -> bool:
    """True if the steps so far have shown values or lanes that the plan does not know of."""
    values = plans.facts.profile.due()
    return _lanes_due(plans, variant) or values


def _replanned(plans: Plans, variant: Variant, call: Call, ballot: Ballot | None = None) -> Variant:
    """Plan again from what the steps so far have shown, if that is worth it."""
    if variant.kind.offload_saved or variant.planned is None:
        return variant
    held = plans.held(call)
    known = None if ballot is None else ballot.known
    settled = plan_again(variant.planned, plans.facts, held, known)
    if settled is None:
        return variant
    plans.look_at_weights(call)
    try:
        if ballot is None:
            made = plans.make_again(call, settled=settled)
        else:
            made = plans.make(call, held, settled=settled, meeting=ballot)
    except Infeasible as error:  # does not fit in what is free just now
        plans.facts.profile.note(f"the plan stays, since for another one: {error.reason}")
        return variant
    plans.trial.replaced(variant.planned.report)
    return made


def _on_trial(plans: Plans, variant: Variant) -> bool:
    """True if the plan's steps are to be measured before another takes its place: a new plan can
    be given up for its predecessor only if that was measured."""
    report = variant.report
    return report is not None and _is_tried(plans) and plans.trial.awaited(report)


def _is_tried(plans: Plans) -> bool:
    """True if plans are judged by measured times, which mean nothing for other sizes or if a
    hardware profile was named."""
    return not plans.facts.symbols and plans.facts.options.hardware is None


def _tried(plans: Plans, variant: Variant, call: Call, ballot: Ballot | None = None) -> Variant:
    """Return the plan, or a better one if the measured steps call for it; see `trial`. `ballot`:
    where ranks judge together, only their leader may return another plan."""
    facts, trial, planned = plans.facts, plans.trial, variant.planned
    if planned is None or not _is_tried(plans):
        return variant
    report, recorded = planned.report, planned.recorder.recorded
    step = trial.due(report, recorded)
    if step is None:
        return variant
    lost = trial.loses_to(report, step) if ballot is None else None
    former = next((v for v in plans.variants if lost and v.report is lost[0]), None)
    if lost and former and former.placement.has_all_of(variant.placement):
        plans.variants.remove(variant)
        facts.profile.note(lost[1])
        log_decision(facts.runs.name, lost[1])
        return choose(plans, call)
    factors = trial.factors(report, step)
    judges = ballot is None or ballot.group.rank == ballot.leader
    if judges and factors is not None and not report.fits and not variant.kind.offload_saved:
        if ballot is not None and ballot.known is not None:
            factors = factors.times(ballot.known.slowest[1])  # of the costs on this rank
        machine = facts.target.machine(facts.target.device_bytes)
        totals = lanes_moved(facts.target.runtime.key)
        touched = trial.pages_go_back(recorded, MANY_TRIMS)  # fewer give back a few MiB
        if facts.profile.costs_due(factors, machine, totals, touched) or plans.shown:
            plans.shown = False
            made = _replanned(plans, variant, call, ballot)
            if made is not variant:
                return made
    lacks_room = planned.decided.spares_room and trial.pages_go_back(recorded)
    if ballot is None and factors is not None and lacks_room:
        return _with_room(plans, variant, call)
    trial.tell(report, step, planned.recorder.recorded)
    return variant


def _lanes_due(plans: Plans, variant: Variant) -> bool:
    """True if lanes run at other speeds than this plan assumes. A named hardware profile already
    states how fast they are."""
    facts, report = plans.facts, variant.report
    asked = facts.options.hardware is None and facts.profile.looked
    if not asked or report is None or report.fits:
        return False
    machine = facts.target.machine(facts.target.device_bytes)
    return facts.profile.lanes_due(machine, lanes_moved(facts.target.runtime.key))
