"""Advises `offcompile.optim` which updates a plan would rather run on the device.

A compiled graph ends with its gradients; the optimizer runs afterwards, and may be created before
or after the plan. This is therefore only advice, for states that do not exist yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from offcompile.ir import HOST, Timeline
from offcompile.ir.units import round_ns
from offcompile.machine.hardware import HardwareProfile
from offcompile.passes.select.update_sides import Ready, updated_on_device

from .annotate import Annotated
from .updates import Updates

#: the most common optimizer, and the one with the most states
USUAL = "adamw"


def advice(
    annotated: Annotated, timeline: Timeline, profile: HardwareProfile
) -> Mapping[str, bool]:
    """Weight on the host → True if the device should update it."""
    updates = replace(Updates.read(USUAL, profile, apart=True, streams=True), block_bytes=None)
    whole = updates.added(annotated).problem
    hosted = {t.id for t in annotated.problem.tensors if t.kind == "weight" and t.home == HOST}
    step = max((span.step for span in timeline.spans), default=0)
    begins = timeline.steps[step][0] if timeline.steps else 0
    ends: dict[str, int] = {}
    busy: dict[str, list[tuple[int, int]]] = {"h2d": [], "d2h": []}
    for span in timeline.spans:
        if span.step == step:
            ends[span.id] = span.end_ns - begins
            if span.lane in busy:
                busy[span.lane].append((span.start_ns - begins, span.end_ns - begins))
    made_by = {t: op.id for op in annotated.problem.ops for t in op.writes}
    found = []
    for op in whole.ops:
        weight = next((t for t in op.writes if t in hosted), None)
        if op.host_duration_us is None or weight is None:
            continue
        gradient = next(t for t in op.reads if whole.tensor[t].kind == "gradient")
        crossing = sum(whole.tensor[t].nbytes for t in op.writes)
        found.append(
            Ready(
                weight,
                ends.get(made_by.get(gradient, ""), 0),
                round_ns(op.host_duration_us),
                round_ns(op.duration_us),
                round(crossing / profile.h2d_gbps),
                round(crossing / profile.d2h_gbps),
            )
        )
    device = updated_on_device(found, busy["h2d"], busy["d2h"])
    return {g.weight: g.weight in device for g in found}
