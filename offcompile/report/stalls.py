"""Breaks a step's time into compute and waits per tensor, planned and measured side by side."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from offcompile.ir import DEVICE, Plan, Timeline
from offcompile.planning.feedback.measured import MeasuredStep

#: the shape and type at the end of a label
_SHAPE = re.compile(r" \S* \w+$")
NS_PER_MS = 1e6
#: number of waits named in one line
NAMED = 3


@dataclass(frozen=True)
class StallRow:
    """The waits of compute for one tensor's moves in one direction; `measured_ns` is None until a
    step has been measured."""

    tensor: str
    name: str
    direction: str
    planned_ns: int
    measured_ns: int | None

    @property
    def worst_ns(self) -> int:
        return max(self.planned_ns, self.measured_ns or 0)


def direction_of(source: str) -> str:
    """The name for moves from this tier: `out` if it is the device, else `load`."""
    return "out" if source == DEVICE else "load"


def tensor_name(tensor: str, labels: Mapping[str, str], names: Mapping[str, str]) -> str:
    """The tensor's name for users, without its shape."""
    label = labels.get(tensor, "")
    if tensor in names:
        return label.partition(names[tensor])[0] + names[tensor]
    path = _SHAPE.sub("", f" {label}").strip()
    return f"{path} {tensor}" if path else tensor


def move_names(plan: Plan, labels: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Move → its name for users, such as `load blocks.3.qkv.weight`."""
    return {
        m.id: f"{direction_of(m.source)} {tensor_name(m.tensor, labels, names)}" for m in plan.moves
    }


def stall_rows(
    plan: Plan,
    timeline: Timeline,
    measured: MeasuredStep | None,
    labels: Mapping[str, str],
    names: Mapping[str, str],
) -> tuple[StallRow, ...]:
    """The waits, longest first. A planned wait for several moves is split evenly among them."""
    moves = {m.id: m for m in plan.moves}

    def key(waited_for: str) -> tuple[str, str]:
        move = moves.get(waited_for)
        return (waited_for, "") if move is None else (move.tensor, direction_of(move.source))

    planned: defaultdict[tuple[str, str], float] = defaultdict(float)
    for stall in timeline.stalls:
        causes = stall.waited_for or ("unknown",)
        for cause in causes:
            planned[key(cause)] += stall.duration_ns / len(causes)
    found: defaultdict[tuple[str, str], int] = defaultdict(int)
    for wait in measured.waits if measured is not None else ():
        found[key(wait.move)] += wait.duration_ns
    rows = [
        StallRow(
            tensor,
            tensor_name(tensor, labels, names),
            direction,
            round(planned.get((tensor, direction), 0.0)),
            None if measured is None else found.get((tensor, direction), 0),
        )
        for tensor, direction in dict.fromkeys([*found, *planned])
    ]
    return tuple(sorted(rows, key=lambda row: -row.worst_ns))


def print_stalls(
    rows: tuple[StallRow, ...],
    timeline: Timeline,
    measured: MeasuredStep | None,
    limit: int | None = None,
) -> str:
    """A one-line summary, followed by a table in milliseconds."""
    planned_ns = round(timeline.makespan_us * 1000)
    standing_ns = sum(stall.duration_ns for stall in timeline.stalls)
    head = ("", "planned ms", "measured ms")
    body = [
        ("step", planned_ns, None if measured is None else measured.step_ns),
        ("compute", planned_ns - standing_ns, None if measured is None else measured.compute_ns),
        ("waiting", standing_ns, None if measured is None else measured.waiting_ns),
    ]
    shown = rows if limit is None else rows[:limit]
    body += [(f"  {_words(row)}", row.planned_ns, row.measured_ns) for row in shown]
    lines = [head, *((name, _ms(a), "-" if b is None else _ms(b)) for name, a, b in body)]
    if len(shown) < len(rows):
        lines.append((f"  … and {len(rows) - len(shown)} more", "", ""))
    width = max(len(name) for name, _, _ in lines)
    table = [f"{name:{width}}  {a:>12}  {b:>12}".rstrip() for name, a, b in lines]
    return "\n".join([stall_line(rows, timeline, measured), "", *table])


def stall_line(
    rows: tuple[StallRow, ...], timeline: Timeline, measured: MeasuredStep | None
) -> str:
    """`step 812 ms: compute 745, waiting 67: layers.3.mlp load 41, …`, measured if available."""
    if measured is None:
        step_ns = round(timeline.makespan_us * 1000)
        standing_ns = sum(stall.duration_ns for stall in timeline.stalls)
        waits = [(_words(row), row.planned_ns) for row in rows]
    else:
        step_ns, standing_ns = measured.step_ns, measured.waiting_ns
        waits = [(_words(row), row.measured_ns or 0) for row in rows]
    waits = sorted((w for w in waits if w[1]), key=lambda w: -w[1])
    text = f"step {_ms(step_ns)} ms: compute {_ms(step_ns - standing_ns)}, waiting "
    text += _ms(standing_ns)
    if waits:
        named = ", ".join(f"{words} {_ms(ns)}" for words, ns in waits[:NAMED])
        text += f": {named}" + (", …" if len(waits) > NAMED else "")
    return text + ("" if measured is not None else " (planned; not yet measured)")


def measured_to_json(measured: MeasuredStep, rows: tuple[StallRow, ...]) -> dict[str, Any]:
    """The measured step as plain values."""
    return {
        "step_ns": measured.step_ns,
        "compute_ns": measured.compute_ns,
        "waiting_ns": measured.waiting_ns,
        "spans": [
            {"id": s.id, "lane": s.lane, "start_ns": s.start_ns, "end_ns": s.end_ns}
            for s in measured.spans
        ],
        "waits": [
            {"op": w.op, "move": w.move, "start_ns": w.start_ns, "duration_ns": w.duration_ns}
            for w in measured.waits
        ],
        "stalls": [
            {
                "tensor": row.tensor,
                "name": row.name,
                "direction": row.direction,
                "planned_ns": row.planned_ns,
                "measured_ns": row.measured_ns,
            }
            for row in rows
        ],
    }


def _words(row: StallRow) -> str:
    return f"{row.name} {row.direction}".rstrip()


def _ms(ns: int) -> str:
    ms = ns / NS_PER_MS
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.1f}" if ms >= 10 else f"{ms:.2f}"
