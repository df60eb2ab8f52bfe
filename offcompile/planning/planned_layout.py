"""A plan's device memory in the order that runs: as a layout computed ahead would have it, and as
a heap would that gives pages back when it is full."""

from __future__ import annotations

from dataclasses import replace

from offcompile.ir import Machine, Plan, Problem, Timeline
from offcompile.passes.build.holes import Returns, Room, returns_of
from offcompile.passes.build.layout import Layout, Stay, lay_out
from offcompile.runtime.memory.heap import KEPT_BYTES

from .presence import Lifetime as Held
from .presence import Presence, presence

#: placing takes the square of their number: of more, only the largest are laid out
MOST_STAYS = 800


def planned_layout(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> Layout:
    """Of all that is born in the step: tensors, copies that arrive, workspaces.

    What stands from the beginning is in nobody's way. `timeline` must be the valid one of `plan`,
    of a problem that is not steady.
    """
    stays, _ = _stays(presence(problem, machine, plan, timeline))
    stays.sort(key=lambda stay: -stay.nbytes)
    return lay_out(stays[:MOST_STAYS])


def planned_returns(
    problem: Problem, machine: Machine, plan: Plan, timeline: Timeline, room: Room
) -> Returns:
    """The same in a heap: `room` is also for what stands from the beginning.

    Where all fits nobody keeps malloc from giving back each of its largest blocks.
    """
    if plan.moves_nothing:
        room = replace(room, nbytes=None, mapped_bytes=room.mapped_bytes or KEPT_BYTES)
    stays, standing_bytes = _stays(presence(problem, machine, plan, timeline))
    if room.nbytes is not None:
        room = replace(room, nbytes=max(room.nbytes - standing_bytes, 0))
    return returns_of(stays, room)


def _stays(found: Presence) -> tuple[list[Stay], int]:
    """What is born in the step, and the bytes that stand from the beginning."""
    last = len(found.steps)
    born: dict[Held, int] = {}
    for number, step in enumerate(found.steps):
        for stay in step.stays:
            born.setdefault(stay, number)
    for arrival in found.arrivals.values():
        if arrival.stay is not None:
            # the run before it may still be at work
            first = max(arrival.runs_before - arrival.in_a_run, 0)
            born[arrival.stay] = min(first, born.get(arrival.stay, first))
    for stay in found.at_start:
        born.pop(stay, None)
    stays = [
        Stay(stay.nbytes, first, max(first, (last if stay.gone_at is None else stay.gone_at) - 1))
        for stay, first in born.items()
    ]
    for number, step in enumerate(found.steps):
        stays.append(Stay(step.run.op.workspace_bytes, number, number))
    return [stay for stay in stays if stay.nbytes], sum(s.nbytes for s in found.at_start)
