"""Gathers the memory in use on each tier over a steady-state step, as columns for the page."""

from __future__ import annotations

from collections import Counter
from typing import Any

from offcompile.ir import DEVICE
from offcompile.planning.timelines import step_start_ns
from offcompile.report.record import Record

from .occupancy import WORKSPACE, Change, occupancy

#: kind of tensor → its band, in the order of drawing, from the bottom up
DRAWN = {
    "weight": "weight",
    "state": "optimizer state",
    "gradient": "gradient",
    "activation": "activation",
    "input": "input/output",
    "output": "input/output",
    "temporary": "workspace",
    WORKSPACE: "workspace",
}
BANDS = tuple(dict.fromkeys(DRAWN.values()))


def memory_data(report: Record) -> list[dict[str, Any]]:
    """For each tier in use, its limit and all changes of a band's bytes, in order.

    `base`: bytes per band at the step's start; `t`: nanoseconds from the previous change; `k`: the
    band; `d`: the change in bytes.
    """
    capacity = {tier.name: tier.capacity_bytes for tier in report.machine.tiers}
    found = []
    for tier, changes in occupancy(report.problem, report.plan, report.timeline).items():
        if not changes:
            continue
        device = tier == DEVICE
        found.append(
            {
                "tier": tier,
                "limit": report.budget_bytes if device else capacity[tier],
                "peak": report.planned_peak_bytes if device else report.timeline.peak_bytes[tier],
                "reserve": report.memory.reserve_bytes if device else 0,
                "holes": report.memory.holes_bytes if device else 0,
                **_columns(changes, step_start_ns(report.timeline)),
            }
        )
    return found


def _columns(changes: tuple[Change, ...], start_ns: int) -> dict[str, Any]:
    base = Counter[str]()
    during = []
    for change in changes:
        if change.time_ns < start_ns:
            base[DRAWN[change.kind]] += change.nbytes
        else:
            during.append(change)
    times = [change.time_ns - start_ns for change in during]
    return {
        "base": [base[band] for band in BANDS],
        "t": [now - before for before, now in zip([0, *times], times, strict=False)],
        "k": [BANDS.index(DRAWN[change.kind]) for change in during],
        "d": [change.nbytes for change in during],
    }
