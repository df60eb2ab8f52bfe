"""Finds the plan that a call runs: `LADDER` lists the candidates in order."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from offcompile.ir import Infeasible
from offcompile.run.accounts.usage import ParameterSet
from offcompile.run.plan.request import HOSTED

from .emptying import emptied
from .hosting import by_preference, hosted
from .plans import Plans
from .variant import Call, Variant


@dataclass(eq=False)
class VariantChooser:
    """Chooses among the plans of one captured graph."""

    plans: Plans
    #: True if the graph returns something other than a loss
    goes_on: bool
    #: for each set of parameters, the sizes and the plan of the last run
    ran: weakref.WeakKeyDictionary[ParameterSet, tuple[tuple[int, ...], Variant]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def first(self, call: Call) -> None:
        """Make the first plan, for the sizes that Dynamo traced."""
        plans = self.plans
        plans.facts.runs.books.invalidate()
        plans.look_at_weights(call)
        held = plans.likely_held(call)
        try:
            plans.make(call, held)
        except Infeasible:
            if plans.surely_held(call) < held:
                self.first(call)
            elif hosted(plans, call) is None:
                raise

    def choose(self, call: Call) -> Variant:
        """Return the newest plan within the budget for this call; make one if needed."""
        if self.plans.facts.runs.budget_bytes is None:
            return self.plans.variants[-1]
        return next(made for way in LADDER if (made := way(self, call)) is not None)


# --- the candidates: None if they do not apply --------------------------------------------------


def last_run(chooser: VariantChooser, call: Call) -> Variant | None:
    """Inside a backward pass, keep the plan of the last run, even if it exceeds the room:
    checkpoint expects a recomputed forward to save the same tensors as the first time."""
    if torch._C._current_graph_task_id() == -1:
        return None
    sizes, variant = chooser.ran.get(call.parameters, (None, None))
    return variant if sizes == call.sizes else None


def follow_weights(chooser: VariantChooser, call: Call) -> None:
    """Make a plan with all weights on the host, to choose from below, if weights of the call left
    to make room for others and no plan hosts any."""
    plans, books = chooser.plans, chooser.plans.facts.runs.books
    hosts = HOSTED in plans.in_vain or any(v.placement.has_any for v in plans.variants)
    if not hosts and not books.sent.isdisjoint(call.parameters.ids):
        hosted(plans, call)


def emptied_at_turn(chooser: VariantChooser, call: Call) -> Variant | None:
    """Take a plan that lets everything saved for backward leave, if this graph is one of several
    whose saved activations together exceed the budget; with weights on the host if need be."""
    return emptied(chooser.plans, call, chooser.goes_on)


def known(chooser: VariantChooser, call: Call) -> Variant | None:
    """Take a plan at hand that fits."""
    plans, books = chooser.plans, chooser.plans.facts.runs.books
    newest, preferred = plans.variants[-1], by_preference(plans, call)
    quick = preferred[:1] == [newest] and newest.knows_needs_at(call.sizes)
    if quick and plans.within(newest, books.most_held(), call):
        return newest
    return plans.first_within(preferred, call)


def new(chooser: VariantChooser, call: Call) -> Variant | None:
    """Make a plan for what is held beside now."""
    plans = chooser.plans
    plans.look_at_weights(call)
    try:
        return plans.make(call, plans.held(call))
    except Infeasible:
        found = hosted(plans, call)
        if found is None:
            raise
        return found


#: the order in which candidates are tried for a call
LADDER: tuple[Callable[[VariantChooser, Call], Variant | None], ...] = (
    last_run,
    follow_weights,
    emptied_at_turn,
    known,
    new,
)
