"""Puts weights on the host where those of other calls, of this graph or others, take the room."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress

import torch

from offcompile.ir import Infeasible
from offcompile.run.plan.request import HOSTED, PlanKind
from offcompile.runtime.moves.weights import is_there_by_plan

from .plans import Plans
from .variant import Call, Variant


def hosted(plans: Plans, call: Call, kind: PlanKind = HOSTED) -> Variant | None:
    """Return a plan with all weights of this call on the host, and send weights of as few other
    calls as possible there. None if that does not free enough."""
    books, entry = plans.facts.runs.books, plans.facts.runs.entry
    others = books.others(entry, call.parameters)
    if not (others or kind.offload_saved) or kind in plans.in_vain:
        return None
    for variant in plans.variants:
        if variant.kind == kind and _have_leave(plans, variant, others, call):
            return variant
    held = plans.held(call)
    sizes = [sum(map(books.holdings.takes, other)) for other in others]
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


def by_preference(plans: Plans, call: Call) -> list[Variant]:
    """List the plans without an empty turn: those that move nothing first, then the newest first.

    Once a plan has put weights on the host, they and the plan stay. If no weight of the call is
    on the host, the plans that leave weights on the device come first.
    """
    newest = plans.variants[-1]
    found = [v for v in reversed(plans.variants) if not v.kind.offload_saved]
    if len(found) > 1 and newest.moves and not newest.placement.has_any:
        found.sort(key=lambda v: v.moves)
    if len(found) > 1 and any(v.placement.has_any for v in found):
        left = have_left(plans, call)
        found.sort(key=lambda v: v.placement.has_any != left)
    return found


def have_left(plans: Plans, call: Call) -> bool:
    """True if weights of the call are on the host because some plan has put them there."""
    return any(is_there_by_plan(call.args[i]) for i in sorted(plans.facts.parameters))


def _have_leave(
    plans: Plans, variant: Variant, others: Sequence[Sequence[torch.Tensor]], call: Call
) -> bool:
    """Send weights of other calls to the host, call by call, until `variant`, which has the weights
    of this call there, fits. Return True if it fits."""
    books = plans.facts.runs.books
    for other in others:
        if plans.within(variant, plans.held(call), call):
            break
        variant.placement.place_alike(call.args, other)
        books.holdings.expect_on_host(other)
        books.sent.update(map(id, other))
        books.invalidate()
    return plans.within(variant, plans.held(call), call)


def _doubling(most: int) -> list[int]:
    """0, 1, 2, 4, … and `most`."""
    powers = itertools.takewhile(lambda n: n < most, (1 << k for k in itertools.count()))
    return list(dict.fromkeys([0, *powers, most]))
