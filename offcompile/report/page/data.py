"""Gathers the data that the page shows for one report, as plain values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offcompile.ir import COMPUTE, DEVICE, HOST, HOST_COMPUTE
from offcompile.ir.units import show_us, size
from offcompile.planning.timelines import NS_PER_US, moved_bytes, settled_spans, total_us
from offcompile.report.before_after import before_after
from offcompile.report.record import Record
from offcompile.report.words import bound_by

from .lanes import lanes_data
from .memory import memory_data
from .tables import module_table
from .waits import waits_data

#: method that proved the lower bound → its description
PROOFS = {
    "compute": "every operation has to run, each as fast as it can",
    "cut": "what has to cross the lanes before and after one crowded moment",
    "traffic": "a linear program over what has to cross the lanes, with time in coarse slots",
    "lp": "a linear program over what has to cross the lanes, operation by operation",
    "milp": "a mixed-integer program over what has to cross the lanes",
}
MEANING = (
    "No valid plan of this step on this machine can be faster than the bound, whatever it moves, "
    "drops or computes again. The gap is how far this plan is above it."
)


def report_data(report: Record) -> dict[str, Any]:
    return {
        "name": report.name,
        "verdict": verdict(report),
        "cards": [
            {"title": title, "value": value, "note": note} for title, value, note in _cards(report)
        ],
        "step_ns": round(report.planned_us * NS_PER_US),
        "memory": memory_data(report),
        **lanes_data(report),
        "waits": waits_data(report),
        "split": split_data(report),
        "ways": list(_ways(report)),
        "certificate": list(_certificate(report)),
        "rates": list(_rates(report)),
        "modules": module_table(report),
    }


def verdict(report: Record) -> str:
    """The outcome in one sentence."""
    peak, budget = size(report.planned_peak_bytes), size(report.budget_bytes)
    if report.fits:
        graphs = " and the compiled graphs are untouched"
        if report.splitting is not None:
            graphs = f", with {report.splitting.subject} in pieces"
        return f"Everything fits: it needs {peak} of the {budget} budget, so nothing moves{graphs}."
    gap = f"{100 * report.gap:.2f}% above the bound that {bound_by(report)} can beat"
    if report.gap < 0.00005:
        gap = f"and {bound_by(report)} can be faster"
    held = f"holding at most {peak} of the {budget} budget"
    return f"Planned at {show_us(report.planned_us)} a step, {gap}, {held}."


def _cards(report: Record) -> Iterator[tuple[str, str, str]]:
    result = report.result
    yield (
        "Planned step",
        show_us(report.planned_us),
        "nothing moves" if report.fits else f"by the policy {report.policy}",
    )
    bound = f"gap {100 * report.gap:.2f}%: no valid plan is faster than the bound"
    yield "Lower bound", show_us(result.lower_bound_us), bound
    measured_us, ratio = report.measured_us, report.measured_over_planned
    if measured_us is None:
        yield "Measured step", "not yet run", "run a step, then save the page again"
    else:
        told = "the median" if ratio is None else f"{ratio:.2f} × planned, the median"
        yield "Measured step", show_us(measured_us), told
    if report.corrected is not None and not report.corrected.factors.same:
        yield "Predicted step", show_us(report.predicted_us), "with ops as in the first steps"
    share = report.planned_peak_bytes / report.budget_bytes if report.budget_bytes else 0.0
    of = f"{share:.1%} of the budget of {size(report.budget_bytes)}"
    yield "Peak", size(report.planned_peak_bytes), of
    peaks = report.timeline.peak_bytes
    for tier in report.machine.tiers:
        if tier.name != DEVICE and peaks.get(tier.name):
            limit = "no limit" if tier.capacity_bytes is None else f"of {size(tier.capacity_bytes)}"
            yield f"On the {tier.name}", size(peaks[tier.name]), f"at most, {limit}"
    if report.plan.moves:
        away, back = _crossing(report)
        yield "Moved per step", size(away + back), f"{size(away)} out, {size(back)} in"
    yield from _drives(report)


def split_data(report: Record) -> dict[str, Any] | None:
    """Lists what was split along tokens, and the figures of the step before and after."""
    made = report.splitting
    if made is None:
        return None
    return {
        "parts": [part.words() for part in made.parts],
        "rows": list(before_after(made, report.problem)),
    }


def _ways(report: Record) -> Iterator[tuple[str, str, str]]:
    """Yields the step of this plan and of each simpler way: name, time, and what is wrong."""
    if not report.simple_ways:
        return
    yield "this plan", show_us(report.planned_us), ""
    for way in report.simple_ways:
        missing = f"{size(way.missing_bytes)} missing" if way.missing_bytes else way.reason
        yield way.name, "no plan" if way.step_us is None else show_us(way.step_us), missing


def _crossing(report: Record) -> tuple[int, int]:
    """Bytes moved off the device and onto it per step."""
    moves, problem = report.plan.moves, report.problem
    away = sum(moved_bytes(problem, m.tensor, m.codec) for m in moves if m.source == DEVICE)
    back = sum(moved_bytes(problem, m.tensor, m.codec) for m in moves if m.target == DEVICE)
    return away, back


def _drives(report: Record) -> Iterator[tuple[str, str, str]]:
    life = report.drive_life
    written = sum(
        moved_bytes(report.problem, move.tensor, move.codec)
        for move in report.plan.moves
        if move.target not in (DEVICE, HOST)
    )
    if life is not None and life.written_bytes_per_step:
        rated = f"per step; rated for {life.endurance_bytes / 1e12:.4g} TB, a drive lasts"
        yield "Written to disk", size(life.written_bytes_per_step), f"{rated} {life.lasts()}"
    elif written:
        yield "Written to disk", size(written), "per step, as planned"


def _certificate(report: Record) -> Iterator[tuple[str, str]]:
    problem, plan, result = report.problem, report.plan, report.result
    yield (
        "Valid",
        "yes: verified by a checker that shares no code with the planner, and simulated to the "
        "nanosecond",
    )
    yield "Lower bound", f"{show_us(result.lower_bound_us)}, by {_proof(result.bound_method)}"
    yield "Gap", f"{100 * report.gap:.2f}%"
    yield "What that means", MEANING
    policy = "none needed" if report.fits else report.policy
    aside = report.memory
    simulated = report.timeline.peak_bytes.get(DEVICE, 0) + aside.reserve_bytes + aside.holes_bytes
    if report.planned_peak_bytes != simulated:
        yield (
            "Peak",
            f"{size(report.planned_peak_bytes)} however fast the lanes turn out to be; "
            f"{size(simulated)} at the speeds planned with",
        )
    yield "Policy", f"{policy}, {result.planned_in}"
    count = f"{len(problem.ops):,} operations on {len(problem.tensors):,} tensors"
    yield "Problem", f"{count}, {size(sum(t.nbytes for t in problem.tensors))} in all"
    decided = (
        f"{len(plan.moves):,} moves, {len(plan.directs):,} operands used in place, "
        f"{len(plan.recomputes):,} operations run again, "
        f"{sum(u.where != DEVICE for u in plan.updates):,} updates on the host"
    )
    yield "Plan", "nothing moves" if report.fits else decided
    yield "Floor", f"{size(report.floor_bytes)}: moving cannot do with less"
    if aside.reserve_bytes or aside.holes_bytes:
        yield (
            "Set aside",
            f"{size(aside.reserve_bytes)} for the runtime, {size(aside.holes_bytes)} for holes "
            "between tensors",
        )
    if report.timeline.note:
        yield "Note", report.timeline.note


def _proof(method: str) -> str:
    return f"{method} ({PROOFS[method]})" if method in PROOFS else method


def _rates(report: Record) -> Iterator[dict[str, Any]]:
    """Yields each lane's rate, and the share of the planned step for which it is busy."""
    spans = settled_spans(report.timeline).values()

    def busy(lane: str) -> float:
        used_us = total_us(s for s in spans if s.lane == lane)
        return used_us / report.planned_us if report.planned_us > 0 else 0.0

    yield {"lane": COMPUTE, "way": "on the device", "rate": "", "busy": busy(COMPUTE)}
    if any(span.lane == HOST_COMPUTE for span in spans):
        yield {"lane": HOST_COMPUTE, "way": "on the host", "rate": "", "busy": busy(HOST_COMPUTE)}
    for lane in report.machine.lanes:
        late = f" after {show_us(lane.latency_us)}" if lane.latency_us else ""
        yield {
            "lane": lane.name,
            "way": f"{lane.source} → {lane.target}",
            "rate": f"{lane.bytes_per_us / 1000:.3g} GB/s{late}",
            "busy": busy(lane.name),
        }
