"""The end of a step: the settled state, and the values that must not be lost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from offcompile.ir.errors import Violation
from offcompile.ir.model import Problem
from offcompile.ir.plan import Drop, Move, Plan, Timeline

from .ledger import Place
from .order import arrives_as, start_codecs
from .record import relative_times

Settled = dict[Place, str | None]  # the copies that remain, each with its codec


@dataclass(frozen=True)
class Leftover:
    """The state at the end of a step, before its wrapped moves and last drops are done."""

    valid: Mapping[Place, str | None]  # complete copies and their codecs
    pending: Sequence[Place]  # drops requested and not yet done
    arriving: Sequence[Move]  # wrapped moves still to arrive, in listed order
    spare: Callable[[str], bool]  # true if the last copy of a value may be dropped


def settle(plan: Plan, left: Leftover) -> tuple[Settled, tuple[Place, ...]]:
    """Returns the settled state, and the drops that no outstanding move can ever release."""
    held = dict(left.valid)
    waiting = list(left.pending)
    by_move: dict[str, list[Drop]] = {}
    for drop in plan.drops:
        if drop.after is not None:
            by_move.setdefault(drop.after, []).append(drop)
    _release(held, waiting, left.spare)
    for move in left.arriving:
        held[(move.tensor, move.target)] = arrives_as(move)
        waiting += [(d.tensor, d.tier) for d in by_move.get(move.id, ())]
        _release(held, waiting, left.spare)
    return held, tuple(place for place in waiting if place in held)


def _release(held: Settled, waiting: list[Place], spare: Callable[[str], bool]) -> None:
    for place in list(waiting):
        tensor, tier = place
        others = any(t == tensor and at != tier for t, at in held)
        if place not in held or others or spare(tensor):
            held.pop(place, None)
            waiting.remove(place)


def check_end(problem: Problem, plan: Plan, step: int, left: Leftover) -> Iterator[Violation]:
    """Checks the rules steady, lost and missing-write-back at the end of one step."""
    settled, stuck = settle(plan, left)
    where = f"end of step {step}"
    for tensor, tier in stuck:
        detail = f"the drop of {tensor} from {tier} can never be done: no other valid copy"
        yield Violation("missing-write-back", where, detail)
    if problem.steady:
        yield from _compare(plan, start_codecs(problem, plan), settled, where)
        return
    kept = {tensor for tensor, _ in settled}
    for tensor_ in problem.tensors:
        if problem.must_survive(tensor_.id) and tensor_.id not in kept:
            detail = f"{tensor_.kind} {tensor_.id} has no valid copy anywhere"
            yield Violation("lost", where, detail)


def _compare(plan: Plan, start: Settled, settled: Settled, where: str) -> Iterator[Violation]:
    optional = {(m.tensor, m.target) for m in plan.moves if m.wraps}
    for tensor, tier in sorted(start.keys() - settled.keys()):
        detail = f"start has {tensor} on {tier}, where no valid copy of it is left"
        yield Violation("steady", where, detail)
    for tensor, tier in sorted(settled.keys() - start.keys() - optional):
        detail = f"a copy of {tensor} is left on {tier}, where start has none"
        yield Violation("steady", where, detail)
    for place in sorted(start.keys() & settled.keys()):
        if start[place] != settled[place]:
            was, now = (codec or "plain" for codec in (start[place], settled[place]))
            detail = f"{place[0]} on {place[1]} is {now}; it started {was}"
            yield Violation("steady", where, detail)


def check_settled(timeline: Timeline, states: Sequence[object]) -> Iterator[Violation]:
    """Checks that the last two steps of a settled record are alike and end in the same state."""
    if not timeline.settled or len(timeline.steps) < 2:
        return
    last = len(timeline.steps) - 1
    differing = relative_times(timeline, last) ^ relative_times(timeline, last - 1)
    if differing:
        shown = "; ".join(f"{name} at {ns} ns" for name, ns in sorted(differing)[:3])
        detail = f"called settled, but its last two steps differ: {shown} in one of them only"
        yield Violation("steady", "settled", detail)
    lengths = [end - begin for begin, end in timeline.steps[-2:]]
    if lengths[0] != lengths[1]:
        detail = f"called settled, but its last two steps last {lengths[0]} and {lengths[1]} ns"
        yield Violation("steady", "settled", detail)
    elif len(states) > 1 and states[-1] != states[-2]:
        detail = "called settled, but its last two steps end in different states"
        yield Violation("steady", "settled", detail)
