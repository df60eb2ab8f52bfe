"""Converts a planned timeline and the measured step to a trace for Perfetto and Chrome."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from offcompile.ir import COMPUTE, HOST_COMPUTE, Plan, Problem, Timeline
from offcompile.planning.feedback.measured import MeasuredStep
from offcompile.planning.timelines import NS_PER_US, moved_bytes

from .stalls import direction_of, tensor_name

PLANNED, MEASURED = 1, 2
Event = dict[str, Any]


def to_trace(
    problem: Problem,
    plan: Plan,
    timeline: Timeline,
    measured: MeasuredStep | None = None,
    labels: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
) -> Event:
    """Chrome trace events, in microseconds: one process for the planned steps and one for the
    measured step, with a row per lane. Slices of moves give tensor, bytes and module."""
    about = _About(problem, plan, labels or {}, names or {})
    events = list(_planned(timeline, about))
    if measured is not None:
        events += _measured(measured, about)
    return {"displayTimeUnit": "ms", "traceEvents": events}


class _About:
    """Makes the arguments shown for each slice."""

    def __init__(
        self, problem: Problem, plan: Plan, labels: Mapping[str, str], names: Mapping[str, str]
    ) -> None:
        self.problem, self.labels, self.names = problem, labels, names
        self.moves = {move.id: move for move in plan.moves}

    def __call__(self, id: str) -> Event:
        move = self.moves.get(id)
        if move is None:
            label = self.labels.get(id.partition("@")[0])
            return {} if label is None else {"module": label}
        return {
            "tensor": move.tensor,
            "nbytes": moved_bytes(self.problem, move.tensor, move.codec),
            "module": self.labels.get(move.tensor, ""),
            "direction": direction_of(move.source),
        }

    def wait(self, *ids: str) -> Event:
        return {"waited_for": list(ids), "what": [self._name(id) for id in ids]}

    def _name(self, id: str) -> str:
        move = self.moves.get(id)
        if move is None:
            return id
        tensor = tensor_name(move.tensor, self.labels, self.names)
        return f"{tensor} {direction_of(move.source)}"


def _planned(timeline: Timeline, about: _About) -> Iterator[Event]:
    row_of = _rows({span.lane for span in timeline.spans})
    yield from _named(PLANNED, "planned", row_of)
    for span in timeline.spans:
        told = {"step": span.step, **about(span.id)}
        yield _slice(PLANNED, row_of[span.lane], span.id, span.start_ns, span.end_ns, told)
    for stall in timeline.stalls:
        end_ns = stall.start_ns + stall.duration_ns
        name, told = f"wait before {stall.op}", about.wait(*stall.waited_for)
        yield _slice(PLANNED, row_of.get(COMPUTE, 0), name, stall.start_ns, end_ns, told)


def _measured(step: MeasuredStep, about: _About) -> Iterator[Event]:
    row_of = _rows({span.lane for span in step.spans})
    yield from _named(MEASURED, "measured", row_of)
    for span in step.spans:
        row = row_of[span.lane]
        told = about(span.id) if span.nbytes is None else {"nbytes": span.nbytes}
        yield _slice(MEASURED, row, span.id, span.start_ns, span.end_ns, told)
    for wait in step.waits:
        told = about(wait.move) | about.wait(wait.move)
        end_ns = wait.start_ns + wait.duration_ns
        name = f"wait before {wait.op}" if wait.op else "wait at the end"
        name = name if wait.move in about.moves else f"wait for {wait.move}"
        yield _slice(MEASURED, row_of.get(COMPUTE, 0), name, wait.start_ns, end_ns, told)


def _rows(busy: set[str]) -> dict[str, int]:
    """Lane → its row, with compute first."""
    first = [lane for lane in (COMPUTE, HOST_COMPUTE) if lane in busy]
    return {lane: row for row, lane in enumerate((*first, *sorted(busy - set(first))), start=1)}


def _named(process: int, name: str, row_of: Mapping[str, int]) -> Iterator[Event]:
    yield _meta(process, "process_name", {"name": name})
    yield _meta(process, "process_sort_index", {"sort_index": process})
    for lane, row in row_of.items():
        yield _meta(process, "thread_name", {"name": lane}, row)
        yield _meta(process, "thread_sort_index", {"sort_index": row}, row)


def _meta(process: int, name: str, told: Event, row: int = 0) -> Event:
    return {"ph": "M", "pid": process, "tid": row, "name": name, "args": told}


def _slice(process: int, row: int, name: str, start_ns: int, end_ns: int, told: Event) -> Event:
    return {
        "ph": "X",
        "pid": process,
        "tid": row,
        "name": name,
        "ts": start_ns / NS_PER_US,
        "dur": (end_ns - start_ns) / NS_PER_US,
        "args": told,
    }
