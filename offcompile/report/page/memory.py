"""What each tier holds over the settled step, as columns that the page draws."""

from __future__ import annotations

from collections import Counter
from typing import Any

from offcompile.ir import DEVICE
from offcompile.planning.timelines import step_start_ns
from offcompile.report.record import Record

from .occupancy import WORKSPACE, Change, occupancy

#: kind of tensor → what it is drawn as; in the order of drawing, from the bottom up
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
BANDS = list(dict.fromkeys(DRAWN.values()))


def memory_data(report: Record) -> list[dict[str, Any]]:
    """Of each tier that holds anything: its limit, and each change of a band's bytes in order.

    `base` is held at the step's start; `t` are nanoseconds since then, each less the one before;
    `k` the band, `d` the bytes more or fewer.
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
                "reserve": report.reserve_bytes if device else 0,
                "holes": report.holes_bytes if device else 0,
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
