"""Predicts the addresses of a plan's device memory in execution order: in a layout computed ahead,
and in a heap that returns pages when it is full."""

from __future__ import annotations

from dataclasses import replace

from offcompile.ir import Machine, Plan, Problem, Timeline
from offcompile.passes.build.layout import AddressStay, Layout, lay_out
from offcompile.runtime.memory.malloc.fragmentation import HeapLimit, Returns, returns_of
from offcompile.runtime.memory.malloc.glibc import KEPT_BYTES
from offcompile.runtime.memory.malloc.placement import LEAST_BYTES, PlacedBlock, most_bytes, place

from .copy_lifetimes import Lifetime as Held
from .copy_lifetimes import Presence, presence

#: limit on the stays to lay out, largest first, since placing takes quadratic time
MOST_STAYS = 800


def planned_layout(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> Layout:
    """Lays out everything born in the step: tensors, arriving copies, workspaces.

    Memory held from the beginning does not interfere. `timeline` must be valid for `plan`, and
    the problem must not be steady.
    """
    stays, _ = _stays(presence(problem, machine, plan, timeline))
    stays.sort(key=lambda stay: -stay.nbytes)
    return lay_out(stays[:MOST_STAYS])


def planned_returns(
    problem: Problem, machine: Machine, plan: Plan, timeline: Timeline, room: HeapLimit
) -> Returns:
    """The same in a heap, where `room` also includes the memory held from the beginning.

    If everything fits, malloc is left free to return each of its largest blocks.
    """
    if plan.moves_nothing:
        room = replace(room, nbytes=None, mapped_bytes=room.mapped_bytes or KEPT_BYTES)
    stays, standing_bytes = _stays(presence(problem, machine, plan, timeline))
    return returns_of(stays, room.smaller(standing_bytes))


def placed_bytes(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> int:
    """The memory that the step takes if its large blocks get places, as the CPU's allocator gives
    them. It searches longer for a layout; what this saves goes to blocks that nobody foresaw.
    Libraries take workspaces from malloc, so that these fill no holes between places."""
    workspaces = max((op.workspace_bytes for op in problem.ops), default=0)
    stays, standing_bytes = _stays(presence(problem, machine, plan, timeline), workspaces=False)
    blocks = [PlacedBlock(stay.nbytes, 0, stay.first, stay.last) for stay in stays]
    large = [block for block in blocks if block.nbytes >= LEAST_BYTES]
    small = [block for block in blocks if block.nbytes < LEAST_BYTES]
    return standing_bytes + place(large, attempts=0).extent_bytes + most_bytes(small) + workspaces


def _stays(found: Presence, workspaces: bool = True) -> tuple[list[AddressStay], int]:
    """The stays born in the step, and the bytes held from the beginning."""
    last = len(found.steps)
    born: dict[Held, int] = {}
    for number, step in enumerate(found.steps):
        for stay in step.stays:
            born.setdefault(stay, number)
    for arrival in found.arrivals.values():
        if arrival.stay is not None:
            # the previous run may still be in progress
            first = max(arrival.runs_before - arrival.in_a_run, 0)
            born[arrival.stay] = min(first, born.get(arrival.stay, first))
    for stay in found.at_start:
        born.pop(stay, None)
    stays = [
        AddressStay(
            stay.nbytes, first, max(first, (last if stay.gone_at is None else stay.gone_at) - 1)
        )
        for stay, first in born.items()
    ]
    for number, step in enumerate(found.steps if workspaces else ()):
        stays.append(AddressStay(step.run.op.workspace_bytes, number, number))
    return [stay for stay in stays if stay.nbytes], sum(s.nbytes for s in found.at_start)
