"""The text of a report, line by line: a graph's plan and its measurements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from offcompile.ir import DEVICE
from offcompile.ir.units import counted, show_bytes, show_us, size
from offcompile.planning.timelines import moved_bytes, settled_spans

from .record import Record
from .stalls import stall_line


def facts(report: Record) -> Iterator[tuple[str, str]]:
    beside = f", beside {show_bytes(report.memory.beside_bytes)} that others hold"
    yield "budget", show_bytes(report.budget_bytes) + (beside if report.memory.beside_bytes else "")
    if report.memory.reserve_bytes:
        yield "", f"of which the runtime takes {show_bytes(report.memory.reserve_bytes)}"
    if report.memory.holes_bytes:
        yield "", f"and {show_bytes(report.memory.holes_bytes)} are left to holes between tensors"
    yield "planned peak", show_bytes(report.planned_peak_bytes)
    if report.layout_waste is not None:
        yield "layout", f"offsets planned ahead would need {report.layout_waste:.1%} more than it"
    yield "floor", f"{show_bytes(report.floor_bytes)}; moving cannot do with less"
    yield from split_facts(report)
    yield "plan", _census(report)
    yield "policy", f"{report.policy}, {report.result.planned_in}"
    for told in report.profile.said if report.profile is not None else ():
        yield "profiling", told
    yield (
        "planned step",
        f"{show_us(report.planned_us)}, {100 * report.gap:.2f}% above the bound of "
        f"{show_us(report.lower_bound_us)} that {bound_by(report)} can beat",
    )
    if report.corrected is not None:
        yield (
            "predicted step",
            f"{show_us(report.predicted_us)}, with ops as in the first steps:"
            f" {report.corrected.factors.words()}",
        )
    elif report.foreseen_us > report.planned_us:
        yield (
            "predicted step",
            f"{show_us(report.foreseen_us)}, with {' and '.join(_also(report))}",
        )
    if report.running.updates_us:
        yield (
            "its update",
            f"about {show_us(report.running.updates_us)} more: torch's optimizers reach weights on "
            "the host over the link; offcompile.optim updates them beside backward",
        )
    measured_us, ratio = report.measured_us, report.measured_over_planned
    if measured_us is None:
        yield "measured step", "not yet run"
    else:
        times = "" if ratio is None else f", {ratio:.2f} × planned"
        if report.corrected is not None and report.measured_over_predicted is not None:
            times += f", {report.measured_over_predicted:.2f} × predicted"
        runs = report.measured_steps
        yield "measured step", f"{show_us(measured_us)}{times} (median of {runs})"
    measured = report.measured_step
    if measured is not None and not report.fits:
        yield "its time", stall_line(report.stall_rows(measured), report.timeline, measured)
    life = report.drive_life
    if life is not None:
        yield "drives", life.words()
    kept = None if report.running.kept is None else report.running.kept()
    if kept is not None:
        yield "between graphs", kept
    if report.verified is not None:
        yield "verified", report.verified.words()


def bound_by(report: Record) -> str:
    """The plans for which the bound holds: all, if it is the time of the ops alone."""
    everywhere = report.result.bound_method == "compute"
    return "no plan" if everywhere else "no plan with weights in these places"


def split_facts(report: Record) -> Iterator[tuple[str, str]]:
    """Yields what was split, then what that gains and costs; nothing if nothing was."""
    made = report.splitting
    if made is None:
        return
    yield "split", f"{report.split}; sums differ from plain in the last bits"
    yield (
        "",
        f"floor {size(made.whole.floor_bytes)} whole, {size(made.split.floor_bytes)} in pieces",
    )
    yield "", f"time of the ops {made.slower:+.1%}"


def traffic(report: Record) -> Iterator[str]:
    """Yields a line of bytes per step for each kind of tensor and route."""
    nbytes: Counter[tuple[str, str, str]] = Counter()
    moves: Counter[tuple[str, str, str]] = Counter()
    for move in report.plan.moves:
        key = (report.problem.tensor[move.tensor].kind, move.source, move.target)
        nbytes[key] += moved_bytes(report.problem, move.tensor, move.codec)
        moves[key] += 1
    rows = [
        (kind, f"{source} → {target}", counted(moves[key], "move"), size(nbytes[key]))
        for key in sorted(nbytes)
        for kind, source, target in [key]
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    for kind, way, count, total in rows:
        yield (f"{kind:{widths[0]}}  {way:{widths[1]}}  {count:>{widths[2]}}  {total:>{widths[3]}}")


def measured_zeros(report: Record) -> list[str]:
    """A line for each evicted tensor with notable zeros: their share, and its format on the way
    out."""
    if report.profile is None:
        return []
    rows = []
    for move in report.plan.moves:
        density = report.profile.densities.get(move.tensor)
        if move.source != DEVICE or density is None:
            continue
        if move.codec is None and not report.profile.has_zeros(move.tensor):
            continue
        raw = report.problem.tensor[move.tensor].nbytes
        goes = f"{size(raw)} as it is"
        if move.codec is not None:
            packed = moved_bytes(report.problem, move.tensor, move.codec)
            goes = f"{size(raw)} as {size(packed)} ({move.codec})"
        rows.append((move.tensor, f"{100 * (1 - density):.1f}% zeros", goes))
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(2)]
    return [f"{t:{widths[0]}}  {zeros:>{widths[1]}}  {goes}" for t, zeros, goes in rows]


def _census(report: Record) -> str:
    if report.fits:
        graphs = "" if report.split else " and the graphs are untouched"
        return f"everything fits; nothing moves{graphs}"
    spans = settled_spans(report.timeline)
    plan = report.plan
    again_us = sum(
        (spans[r.id].end_ns - spans[r.id].start_ns) / 1000 for r in plan.recomputes if r.id in spans
    )
    on_host = sum(update.where != DEVICE for update in plan.updates)
    moving = len({move.tensor for move in plan.moves})
    parts = {
        f"moving: {counted(moving, 'tensor')}": moving,
        f"run again: {counted(len(plan.recomputes), 'op')}, {show_us(again_us)}": len(
            plan.recomputes
        ),
        f"accessed in place: {counted(len(plan.directs), 'operand')}": len(plan.directs),
        f"run on the host: {counted(on_host, 'update')}": on_host,
    }
    return "; ".join(said for said, there_is in parts.items() if there_is)


def _also(report: Record) -> Iterator[str]:
    """Yields the costs that `foreseen_us` adds to the planned step."""
    if report.timeline.toll_us:
        moves = counted(len(report.plan.moves), "move")
        yield f"{show_us(report.timeline.toll_us)} that {moves} take from compute"
    returns = report.returns
    if report.memory.touch_us_per_mib and returns is not None and returns.touched_bytes:
        touched = size(returns.touched_bytes)
        why = "in blocks that malloc does not keep" if report.fits else "for want of room"
        yield f"{touched} that go back to the system {why} and are touched again"
