"""Prints plans, checks and profiles as tables.

The number of rows is limited; `--json` and `--output` contain everything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from offcompile.ir import HOST_COMPUTE, Machine, Plan, Problem, Span, Timeline, Violation
from offcompile.ir.units import compressed_bytes, printable, show_us, size
from offcompile.machine.hardware import HardwareProfile
from offcompile.planning.planner import PlanResult

MOVES_SHOWN = 24
STALLS_SHOWN = 8
VIOLATIONS_SHOWN = 20
WIDTH_OFF_TERMINAL = 132


def show_plan(problem: Problem, machine: Machine, result: PlanResult) -> None:
    timeline, plan = result.timeline, result.plan
    waits = sum(stall.duration_ns for stall in timeline.stalls) / 1000
    facts = {
        "policy": f"{result.policy} ({result.planned_in})",
        "problem": f"{len(problem.ops)} ops, {len(problem.tensors)} tensors, "
        f"{size(sum(t.nbytes for t in problem.tensors))} in all",
        "makespan": show_us(timeline.makespan_us),
        "lower bound": f"{show_us(result.lower_bound_us)} ({result.bound_method})",
        "gap": f"{100 * result.gap:.2f}% above the bound, which no valid plan can beat",
        "waiting": f"{show_us(waits)} before {_count(len(timeline.stalls), 'op')}"
        if timeline.stalls
        else "no op waits",
        "plan": _census(plan),
    }
    _print(
        _facts(facts),
        _memory(machine, timeline),
        _lanes(problem, machine, plan, timeline),
        _moves(problem, plan, timeline),
        _stalls(timeline),
        *_note(timeline),
    )


def show_check(
    machine: Machine,
    violations: Sequence[Violation],
    timeline: Timeline | None,
) -> None:
    if not violations and timeline is not None:
        _print(
            Text.assemble(("valid", "bold green"), f"  makespan {show_us(timeline.makespan_us)}"),
            _memory(machine, timeline),
            _stalls(timeline),
            *_note(timeline),
        )
        return
    table = _table("", ("rule", "where", "what was found"))
    for violation in violations[:VIOLATIONS_SHOWN]:
        table.add_row(*_cells(violation.rule, violation.where, violation.detail))
    _print(
        Text.assemble(("not valid", "bold red"), f"  {_count(len(violations), 'violation')}\n"),
        table,
        *_more(len(violations) - VIOLATIONS_SHOWN, "--json"),
    )


def show_profiles(profiles: Sequence[HardwareProfile]) -> None:
    figures = ("memory", "GB/s", "bf16 TFLOP/s", "host link GB/s")
    table = _table("", ("name", "device", *figures), figures)
    for p in profiles:
        flops = p.matmul_tflops.get("bf16")
        link = f"{p.h2d_gbps:g} / {p.d2h_gbps:g}"
        table.add_row(
            *_cells(
                p.name,
                p.title,
                size(p.device_memory_bytes),
                f"{p.memory_gbps:g}",
                "-" if flops is None else f"{flops:g}",
                link,
            )
        )
    _print(
        table,
        Text("\nStarting figures, from datasheets and published measurements; a .toml of your own"),
        Text('with the same keys (or `base = "rtx4090"` and what differs) goes wherever a name'),
        Text("does. The link is to the device / from the device."),
    )


# --- parts ---------------------------------------------------------------------------------


def _memory(machine: Machine, timeline: Timeline) -> RenderableType:
    figures = ("peak", "capacity", "used")
    table = _table("memory", ("tier", *figures), figures)
    for tier in machine.tiers:
        peak = timeline.peak_bytes.get(tier.name, 0)
        if tier.capacity_bytes is None:
            capacity, used = "unlimited", "-"
        else:
            capacity = size(tier.capacity_bytes)
            used = f"{100 * peak / tier.capacity_bytes:.1f}%" if tier.capacity_bytes else "-"
        table.add_row(*_cells(tier.name, size(peak), capacity, used))
    return table


def _lanes(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> RenderableType:
    """The traffic and busy time of each lane in one step."""
    figures = ("moves", "bytes", "busy", "of the step")
    table = _table("lanes, per step", ("lane", *figures), figures)
    last = len(timeline.steps) - 1
    busy_ns: dict[str, int] = {}
    for span in _settled(timeline.spans, last):
        busy_ns[span.lane] = busy_ns.get(span.lane, 0) + span.end_ns - span.start_ns
    names = ["compute", *([HOST_COMPUTE] if HOST_COMPUTE in busy_ns else [])]
    for name in dict.fromkeys([*names, *(lane.name for lane in machine.lanes)]):
        moves = [m for m in plan.moves if m.lane == name]
        moved = sum(_moved_bytes(problem, m.tensor, m.codec) for m in moves)
        share = busy_ns.get(name, 0) / 1000 / timeline.makespan_us if timeline.makespan_us else 0.0
        table.add_row(
            *_cells(
                name,
                "-" if name in names else str(len(moves)),
                "-" if name in names else size(moved),
                show_us(busy_ns.get(name, 0) / 1000),
                f"{100 * share:.1f}%",
            )
        )
    return table


def _moves(problem: Problem, plan: Plan, timeline: Timeline) -> RenderableType:
    if not plan.moves:
        return Text("nothing moves")
    headers = ("move", "tensor", "bytes", "way", "after", "ready before", "starts", "takes")
    table = _table("moves, by start within the step", headers, ("bytes", "starts", "takes"))
    last = len(timeline.steps) - 1
    span_of = {s.id: s for s in _settled(timeline.spans, last)}
    begin_of = {
        move_id: (span.start_ns - timeline.steps[span.step][0]) / 1000
        for move_id, span in span_of.items()
        if span.step < len(timeline.steps)
    }
    ordered = sorted(plan.moves, key=lambda m: begin_of.get(m.id, 0.0))
    for move in ordered[:MOVES_SHOWN]:
        span = span_of.get(move.id)
        way = f"{move.source} → {move.target}" + (f" as {move.codec}" if move.codec else "")
        wraps = " (next step)" if move.wraps else ""
        table.add_row(
            *_cells(
                move.id,
                move.tensor,
                size(_moved_bytes(problem, move.tensor, move.codec)),
                way,
                move.start_after or "the start",
                (move.ready_before or "the end") + wraps,
                show_us(begin_of[move.id]) if move.id in begin_of else "-",
                show_us((span.end_ns - span.start_ns) / 1000) if span else "-",
            )
        )
    return Group(table, *_more(len(plan.moves) - MOVES_SHOWN, "--json or --output"))


def _stalls(timeline: Timeline) -> RenderableType:
    if not timeline.stalls:
        return Group()
    headers = ("before", "from", "for", "waited for")
    table = _table("longest waits", headers, ("from", "for"))
    begin_ns = timeline.steps[-1][0] if timeline.steps else 0
    longest = sorted(timeline.stalls, key=lambda s: -s.duration_ns)[:STALLS_SHOWN]
    for stall in longest:
        table.add_row(
            *_cells(
                stall.op,
                show_us((stall.start_ns - begin_ns) / 1000),
                show_us(stall.duration_ns / 1000),
                ", ".join(stall.waited_for[:4]) or "-",
            )
        )
    return Group(table, *_more(len(timeline.stalls) - STALLS_SHOWN, ""))


def _note(timeline: Timeline) -> list[RenderableType]:
    return [Text(printable(f"note: {timeline.note}"))] if timeline.note else []


def _census(plan: Plan) -> str:
    on_host = sum(u.where == "host" for u in plan.updates)
    counts = {
        "move": len(plan.moves),
        "drop": len(plan.drops),
        "direct access": len(plan.directs),
        "recomputation": len(plan.recomputes),
        "host update": on_host,
    }
    said = [_count(n, what) for what, n in counts.items() if n]
    return ", ".join(said) or "everything stays on the device"


def _count(count: int, noun: str) -> str:
    plural = "" if count == 1 else "es" if noun.endswith("s") else "s"
    return f"{count} {noun}{plural}"


def _settled(spans: Iterable[Span], last_step: int) -> list[Span]:
    """The latest span of each op and move: in the last step, or before it for wrapped moves."""
    latest: dict[str, Span] = {}
    for span in spans:
        if span.step <= last_step and (span.id not in latest or latest[span.id].step < span.step):
            latest[span.id] = span
    return list(latest.values())


def _moved_bytes(problem: Problem, tensor_id: str, codec: str | None) -> int:
    tensor = problem.tensor[tensor_id]
    if codec is None or codec not in tensor.ratios:
        return tensor.nbytes
    return compressed_bytes(tensor.nbytes, tensor.ratios[codec])


# --- rich ----------------------------------------------------------------------------------


def _print(*parts: RenderableType) -> None:
    wide = None if sys.stdout.isatty() else WIDTH_OFF_TERMINAL
    console = Console(width=wide, highlight=False)
    with console.capture() as shown:
        for part in parts:
            console.print(part)
    # rich's own printing would end the program when the pipe is closed
    sys.stdout.write(shown.get())


def _table(title: str, headers: Sequence[str], figures: Sequence[str] = ()) -> Table:
    """Make a table. Columns that are also in `figures` are right-aligned."""
    heading = f"\n{title}" if title else None
    table = Table(
        title=heading,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    for header in headers:
        justify: JustifyMethod = "right" if header in figures else "left"
        table.add_column(header, justify=justify, overflow="fold", no_wrap=header in figures)
    return table


def _facts(facts: Mapping[str, str]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), Text(printable(value)))
    return Padding(table, (0, 1))


def _cells(*values: str) -> list[Text]:
    """Wrap values as text, so that brackets in ids are not taken for markup."""
    return [Text(printable(value)) for value in values]


def _more(count: int, where: str) -> list[RenderableType]:
    if count <= 0:
        return []
    return [Text(f"  … and {count} more" + (f" ({where} has all)" if where else ""))]
