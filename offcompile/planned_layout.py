"""What a layout computed ahead would make of a plan's device memory, in the order that runs."""

from __future__ import annotations

from offcompile.ir import Machine, Plan, Problem, Timeline
from offcompile.passes.layout import Layout, Stay, lay_out
from offcompile.presence import Stay as Held
from offcompile.presence import presence

#: placing takes the square of their number: of more, only the largest are laid out
MOST_STAYS = 800


def planned_layout(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> Layout:
    """Of all that is born in the step: tensors, copies that arrive, workspaces.

    What stands from the beginning is in nobody's way. `timeline` must be the valid one of `plan`,
    of a problem that is not steady.
    """
    found = presence(problem, machine, plan, timeline)
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
    stays.sort(key=lambda stay: -stay.nbytes)
    return lay_out([stay for stay in stays[:MOST_STAYS] if stay.nbytes])
