"""Lets optimizers have the room that the calls of a step leave; see `accounts.spare_room`."""

from __future__ import annotations

from offcompile.ir.units import show_bytes
from offcompile.report.log import log_decision
from offcompile.runtime.memory.accelerators import device_module

from .plans import Call, Plans, Variant


def give_spare_room(plans: Plans) -> None:
    """Move states that nothing has placed to the device, if a whole step has left room for them."""
    usage, device = plans.facts.runs.usage, plans.facts.target.device
    budget = plans.facts.runs.budget_bytes
    if budget is None or device.type == "cpu" or plans.agreement.planned_together:
        return

    def free_bytes() -> int:
        return budget - int(device_module(device.type).max_memory_allocated(device))

    owners = usage.owners()
    moved = usage.spare.filled(owners, device, budget, free_bytes) if owners else 0
    if moved:
        usage.invalidate()
        text = f"optimizer states on the device take {show_bytes(moved)} more from now on, since no"
        log_decision(plans.facts.runs.name, f"{text} call of a step has used that room")


def note_spare_room(plans: Plans, variant: Variant, call: Call) -> None:
    """Note the room that this call leaves, while a step is watched for it."""
    budget, usage = plans.facts.runs.budget_bytes, plans.facts.runs.usage
    if budget is not None and usage.spare.is_watched:
        used = variant.needs_at(call.sizes).peak_bytes + plans.held(call)
        usage.spare.note(budget - used)
