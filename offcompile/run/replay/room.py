"""Counts the device and host memory that captured graphs take, and finds the host's beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from offcompile.ir import HOST
from offcompile.ir.units import show_bytes
from offcompile.machine.target import CudaTarget
from offcompile.run.plan.carry_out import gradients_on_host
from offcompile.run.plan.contract import GraphFacts, Planned
from offcompile.runtime.device.cuda.capture import HostRoom
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.graphs import CannotCapture

from .halves import CapturedHalf


def host_rooms(device: CudaDevice, planned: Planned) -> list[HostRoom]:
    """Host memory for the gradients that leave. HostFull if there is no room for them."""
    sizes = gradients_on_host(planned.report.problem, planned.report.plan)
    found = []
    for flat in device.addressable(sizes) if sizes else ():
        slot = device.shadows.find(flat)
        assert slot is not None, "the device does not know its own memory"
        found.append(HostRoom(flat, slot))
    return found


def more_on_host(planned: Planned, halves: Sequence[CapturedHalf]) -> int:
    """Bytes of the host that graphs hold beyond the peak of their plan: it uses memory that
    activations have left for gradients."""
    problem = planned.report.problem
    weights = sum(t.nbytes for t in problem.tensors if t.kind == "weight" and t.home == HOST)
    held = {slot for half in halves for slot in half.capture.held}
    held_bytes = sum(slot.nbytes for slot in held)
    return max(0, weights + held_bytes - planned.needs.planned.host_bytes)


def check_room(facts: GraphFacts, planned: Planned, halves: Sequence[CapturedHalf]) -> None:
    """Raise CannotCapture if the graphs take more than the budget, or than the host tier has."""
    _check_host(facts, planned, halves)
    if facts.runs.budget_bytes is not None and facts.options.memory is not None:
        _check_device(facts, planned, halves, facts.runs.budget_bytes)


def _check_host(facts: GraphFacts, planned: Planned, halves: Sequence[CapturedHalf]) -> None:
    runs, room_bytes = facts.runs, facts.target.host_room_bytes
    more_bytes = more_on_host(planned, halves)
    if not more_bytes or room_bytes is None:
        return
    total = planned.needs.planned.host_bytes + more_bytes
    total += runs.usage.host_beside(runs.entry, runs.binding)
    if total > room_bytes:
        raise CannotCapture(
            f"graphs keep host memory for activations and gradients at once, {show_bytes(total)}"
            f" with all else there, more than the {show_bytes(room_bytes)} of the host tier; set"
            " host_memory to that"
        )


def _check_device(
    facts: GraphFacts, planned: Planned, halves: Sequence[CapturedHalf], budget_bytes: int
) -> None:
    """Also have an excess planned for."""
    runs, needs = facts.runs, planned.needs.planned
    taken = max(half.taken_bytes for half in halves)
    if isinstance(facts.target, CudaTarget):
        taken += facts.target.library_bytes  # a captured step finds them held
    total = max(needs.peak_bytes, needs.standing_bytes + taken)
    total += sum(half.arguments.nbytes + half.results.copied_bytes for half in halves)
    total += runs.usage.held_beside(runs.entry, runs.binding).in_step
    if total > budget_bytes:
        runs.exceeded(total - budget_bytes)
        raise CannotCapture(
            f"with copies of inputs and outputs and its pool a step takes {show_bytes(total)}, more"
            f" than the budget of {show_bytes(budget_bytes)}; set memory to that, or wait for a"
            " plan with that much less"
        )
