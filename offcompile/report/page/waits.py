"""Gathers a step's compute time and its waits for tensors, planned and measured."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from offcompile.ir.units import show_us
from offcompile.planning.timelines import NS_PER_US
from offcompile.report.record import Record

#: number of waits named in the sentence; the table has all
TOLD = 3


def waits_data(report: Record) -> dict[str, Any]:
    """The page's data on waits. `said` (a sentence) and `steps` (length, compute) have the keys
    `planned` and `measured`; `rows` lists all waits."""
    measured = report.measured_step
    rows = report.stall_rows(measured)
    names = [f"{row.name} {row.direction}".rstrip() for row in rows]
    step_ns = round(report.planned_us * NS_PER_US)
    standing_ns = sum(stall.duration_ns for stall in report.timeline.stalls)
    steps = {"planned": (step_ns, step_ns - standing_ns)}
    waits = {"planned": [row.planned_ns for row in rows]}
    if measured is not None:
        steps["measured"] = (measured.step_ns, measured.compute_ns)
        waits["measured"] = [row.measured_ns or 0 for row in rows]
    return {
        "said": {by: sentence(*steps[by], zip(names, waits[by], strict=True)) for by in steps},
        "steps": steps,
        "rows": [
            # a wait for anything but a move has no direction, and names no tensor
            [r.name, r.direction, r.tensor if r.direction else None, r.planned_ns, r.measured_ns]
            for r in rows
        ],
    }


def sentence(step_ns: int, compute_ns: int, waits: Iterable[tuple[str, int]]) -> str:
    """`step 812 ms: compute 745 ms, waiting 67 ms: layers.3.mlp load 41 ms, …`"""
    told = f"step {_show(step_ns)}: compute {_show(compute_ns)}"
    named = sorted(((name, ns) for name, ns in waits if ns > 0), key=lambda w: -w[1])
    if not named:
        return f"{told}, no waiting."
    parts = ", ".join(f"{name} {_show(ns)}" for name, ns in named[:TOLD])
    end = ", …" if len(named) > TOLD else "."
    return f"{told}, waiting {_show(step_ns - compute_ns)}: {parts}{end}"


def _show(ns: int) -> str:
    return show_us(ns / NS_PER_US)
