"""Formats a planned timeline for people and for tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from offcompile.ir import Machine, Problem, Span, Timeline
from offcompile.ir.units import compressed_bytes, show_bytes, show_us

NS_PER_US = 1000


def timeline_to_json(timeline: Timeline) -> dict[str, Any]:
    """Everything the timeline holds; times in integer nanoseconds from the first step's start."""
    return {
        "makespan_us": timeline.makespan_us,
        "peak_bytes": dict(timeline.peak_bytes),
        "settled": timeline.settled,
        "note": timeline.note,
        "steps": [{"start_ns": start, "end_ns": end} for start, end in timeline.steps],
        "spans": [
            {
                "id": s.id,
                "lane": s.lane,
                "step": s.step,
                "start_ns": s.start_ns,
                "end_ns": s.end_ns,
            }
            for s in timeline.spans
        ],
        "stalls": [
            {
                "op": s.op,
                "start_ns": s.start_ns,
                "duration_ns": s.duration_ns,
                "waited_for": list(s.waited_for),
            }
            for s in timeline.stalls
        ],
        "freed": [
            {"tensor": f.tensor, "tier": f.tier, "time_ns": f.time_ns, "cause": f.cause}
            for f in timeline.freed
        ],
    }


def print_timeline(machine: Machine, timeline: Timeline) -> str:
    """Peaks, waits and everything that runs in the settled step, from its start."""
    return "\n".join(_lines(machine, timeline)) + "\n"


def _lines(machine: Machine, timeline: Timeline) -> Iterator[str]:
    yield f"step {show_us(timeline.makespan_us)}"
    for tier in machine.tiers:
        limit = "no limit" if tier.capacity_bytes is None else show_bytes(tier.capacity_bytes)
        yield f"peak {tier.name} {show_bytes(timeline.peak_bytes.get(tier.name, 0))} of {limit}"
    if timeline.note:
        yield f"note {timeline.note}"
    begin_ns = step_start_ns(timeline)
    if timeline.stalls:
        yield "\nwaits: before which op, from, for how long, for what"
    for stall in timeline.stalls:
        start = show_us((stall.start_ns - begin_ns) / NS_PER_US)
        length = show_us(stall.duration_ns / NS_PER_US)
        yield f"  {stall.op}  {start}  {length}  {', '.join(stall.waited_for) or '-'}"
    yield "\nspans: start, how long, where, what"
    for span in sorted(settled_spans(timeline).values(), key=lambda s: (s.start_ns, s.end_ns)):
        start_us, length_us = since_step_us(timeline, span), duration_us(span)
        yield f"  {start_us:14.3f} µs  {length_us:12.3f} µs  {span.lane:14}  {span.id}"


# --- figures -------------------------------------------------------------------------------


def step_start_ns(timeline: Timeline) -> int:
    return timeline.steps[-1][0] if timeline.steps else 0


def settled_spans(timeline: Timeline) -> dict[str, Span]:
    """The last span of everything that ran: in the last step or, if wrapped, in the one before."""
    last = len(timeline.steps) - 1
    latest: dict[str, Span] = {}
    for span in timeline.spans:
        if span.step <= last and (span.id not in latest or latest[span.id].step < span.step):
            latest[span.id] = span
    return latest


def duration_us(span: Span) -> float:
    return (span.end_ns - span.start_ns) / NS_PER_US


def since_step_us(timeline: Timeline, span: Span) -> float:
    """The span's start, relative to the start of the step that queued it."""
    steps = timeline.steps
    begin_ns = steps[span.step][0] if span.step < len(steps) else step_start_ns(timeline)
    return (span.start_ns - begin_ns) / NS_PER_US


def moved_bytes(problem: Problem, tensor_id: str, codec: str | None) -> int:
    """Bytes that one move of the tensor carries."""
    tensor = problem.tensor[tensor_id]
    if codec is None or codec not in tensor.ratios:
        return tensor.nbytes
    return compressed_bytes(tensor.nbytes, tensor.ratios[codec])


def total_us(spans: Iterable[Span]) -> float:
    return sum(span.end_ns - span.start_ns for span in spans) / NS_PER_US
