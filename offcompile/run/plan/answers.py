"""Writes the plan of a graph as JSON for other ranks, and reads what another rank has written.

An answer has the problem, the machine and the plan, and how the planned graphs came from those
given; or the reason why there is no plan. A rank of another version may have written anything, so
each part is checked as it is read. Later processes read answers, too (`remembered`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from offcompile.ir import Infeasible, Machine, OffloadError, Plan, Problem
from offcompile.ir.jsonio import (
    machine_from_json,
    machine_to_json,
    plan_from_json,
    plan_to_json,
    problem_from_json,
    problem_to_json,
)
from offcompile.planning.order import Order, RunStep, StartStep, WaitStep
from offcompile.run.ranks.meeting import Answer

from .candidates import Candidate, Rewrites

#: number of this format; raise it with every change of what an answer says
FORMAT = 2

Part = TypeVar("Part")


class Unreadable(Exception):
    """The answer of another rank cannot be read."""


class TheirSearch(NamedTuple):
    """The search that has found a plan: how, in what time, and with what proof."""

    policy: str
    seconds: float
    lower_bound_us: float
    bound_method: str


@dataclass(frozen=True)
class TheirPlan:
    """The plan of another rank, as it was found there."""

    problem: Problem
    machine: Machine
    plan: Plan
    search: TheirSearch
    order: Order
    kept: frozenset[str] | None
    fits: bool
    holes_bytes: int
    touching_us: float
    updates_us: float
    spares_room: bool
    #: weights that stay on the device; None: all do
    stays: frozenset[str] | None
    #: number of pieces of the loss; None: whole
    pieces: int | None
    rewrites: Rewrites


@dataclass(frozen=True)
class TheirRefusal:
    """The reason why another rank has found no plan, and the budget that it had."""

    error: Infeasible
    budget_bytes: int | None


# --- writing ------------------------------------------------------------------------------------


def answer_of(found: Candidate) -> Answer:
    """Return a plan as JSON."""
    choice, decided = found.choice, found.choice.decided
    result, withheld = decided.result, found.rewrites.withheld
    return {
        "problem": problem_to_json(choice.annotated.problem),
        "machine": machine_to_json(decided.machine),
        "plan": plan_to_json(result.plan),
        "policy": result.policy,
        "seconds": result.seconds,
        "lower_bound_us": result.lower_bound_us,
        "bound_method": result.bound_method,
        "order": _order_to_json(decided.order),
        "kept": None if decided.kept is None else sorted(decided.kept),
        "fits": decided.fits,
        "holes_bytes": decided.holes_bytes,
        "touching_us": decided.touching_us,
        "updates_us": decided.updates_us,
        "spares_room": decided.spares_room,
        "stays": None if choice.stays is None else sorted(choice.stays),
        "pieces": found.pieces,
        "apart": found.rewrites.apart,
        "bits": found.rewrites.bits,
        "withheld": None if withheld is None else sorted(withheld),
    }


def refusal_of(error: Infeasible, budget_bytes: int | None) -> Answer:
    """Return a refusal as JSON."""
    refused = [error.reason, error.needed_bytes, error.smallest_change]
    return {"refused": refused, "budget_bytes": budget_bytes}


# --- reading ------------------------------------------------------------------------------------


def read_answer(said: Mapping[str, Any]) -> TheirPlan | TheirRefusal:
    """Read the answer of another rank. Raises `Unreadable`."""
    try:
        return _refusal(said) if "refused" in said else _plan(said)
    except (LookupError, TypeError, ValueError, OffloadError) as error:
        kind = "" if isinstance(error, OffloadError) else f"{type(error).__name__}: "
        raise Unreadable(f"it cannot be read ({kind}{error})") from None


def _refusal(said: Mapping[str, Any]) -> TheirRefusal:
    reason, needed_bytes, change = _is(said["refused"], list)
    error = Infeasible(_is(reason, str), _or_none(needed_bytes, int), _is(change, str))
    return TheirRefusal(error, _or_none(said["budget_bytes"], int))


def _plan(said: Mapping[str, Any]) -> TheirPlan:
    problem, plan = problem_from_json(said["problem"]), plan_from_json(said["plan"])
    return TheirPlan(
        problem,
        machine_from_json(said["machine"]),
        plan,
        TheirSearch(
            _is(said["policy"], str),
            _number(said["seconds"]),
            _number(said["lower_bound_us"]),
            _is(said["bound_method"], str),
        ),
        _order_from_json(said["order"], problem, plan),
        _names(said["kept"]),
        _is(said["fits"], bool),
        _is(said["holes_bytes"], int),
        _number(said["touching_us"]),
        _number(said["updates_us"]),
        _is(said["spares_room"], bool),
        _names(said["stays"]),
        _or_none(said["pieces"], int),
        Rewrites(_is(said["apart"], bool), _is(said["bits"], bool), _names(said["withheld"])),
    )


_STEPS: dict[str, type[RunStep | StartStep | WaitStep]] = {
    "run": RunStep,
    "start": StartStep,
    "wait": WaitStep,
}
_NAMES = {kind: name for name, kind in _STEPS.items()}


def _order_to_json(order: Order) -> list[Any]:
    steps = [(_NAMES[type(step)], *vars(step).values()) for step in order.steps]
    return [steps, order.device_bytes, order.peak_bytes, dict(order.tier_bytes), order.split]


def _order_from_json(said: list[Any], problem: Problem, plan: Plan) -> Order:
    steps, device_bytes, peak_bytes, tier_bytes, split = _is(said, list)
    made = tuple(_STEPS[kind](_is(name, str)) for kind, name in steps)
    moves = {move.id for move in plan.moves}
    for step in made:
        known = (
            step.name.partition("@")[0] in problem.op
            if isinstance(step, RunStep)
            else (step.move in moves)
        )
        if not known:
            raise LookupError(f"its order has a step of its own: {step}")
    return Order(
        made,
        tuple(_is(nbytes, int) for nbytes in device_bytes),
        _is(peak_bytes, int),
        {_is(tier, str): _is(nbytes, int) for tier, nbytes in _is(tier_bytes, dict).items()},
        _is(split, int),
    )


def _is(value: object, kind: type[Part]) -> Part:
    """Return a value of a type; `True` is no number here."""
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value


def _or_none(value: object, kind: type[Part]) -> Part | None:
    return None if value is None else _is(value, kind)


def _number(value: object) -> float:
    return value if isinstance(value, float) else _is(value, int)


def _names(value: object) -> frozenset[str] | None:
    return None if value is None else frozenset(_is(one, str) for one in _is(value, list))
