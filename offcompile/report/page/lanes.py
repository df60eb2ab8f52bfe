"""Gathers the spans on each lane in a steady-state step, planned and measured, as columns."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

from offcompile.ir import COMPUTE, HOST_COMPUTE
from offcompile.planning.feedback.measured import MeasuredStep
from offcompile.planning.timelines import moved_bytes, step_start_ns
from offcompile.report.modes import path_in
from offcompile.report.record import Record
from offcompile.report.stalls import direction_of, move_names, tensor_name

from .memory import DRAWN

Row = tuple[str, int, int]  # id, start, end
Rows = dict[str, list[Row]]


def lanes_data(report: Record) -> dict[str, Any]:
    """The page's data on lanes.

    `things`: the ops and moves that spans refer to, once each, as (id, label, what, band or phase,
    tensor, bytes). `lanes`: start, duration and thing of every span. `stalls`: (start, duration,
    op, what for), all on compute. Times are nanoseconds since the step's start, clipped to the
    step.
    """
    return _Gatherer(report).data()


def _seen(measured: MeasuredStep) -> Rows:
    """Lane → its measured spans, clipped to the step."""
    rows: Rows = {}
    for span in measured.spans:
        if span.start_ns < measured.step_ns:
            row = span.id, span.start_ns, min(span.end_ns, measured.step_ns)
            rows.setdefault(span.lane, []).append(row)
    return rows


class _Gatherer:
    def __init__(self, report: Record) -> None:
        self.report = report
        self.things: dict[str, list[Any]] = {}
        self.place: dict[str, int] = {}

    def data(self) -> dict[str, Any]:
        report = self.report
        planned, measured = self._planned(), report.measured_step
        seen = {} if measured is None else _seen(measured)
        order = (COMPUTE, HOST_COMPUTE, *(lane.name for lane in report.machine.lanes))
        order += tuple(lane for lane in seen if lane not in order)  # reductions over ranks
        lanes = [
            {
                "lane": lane,
                "planned": self._columns(planned.get(lane, ())),
                "measured": None if measured is None else self._columns(seen.get(lane, ())),
            }
            for lane in order
            if lane in planned or lane in seen
        ]
        begin_ns = step_start_ns(report.timeline)
        stalls = {
            "planned": [
                [s.start_ns - begin_ns, s.duration_ns, s.op, self._waited(s.waited_for)]
                for s in report.timeline.stalls
            ],
            "measured": [
                [w.start_ns, w.duration_ns, w.op, self._waited((w.move,))]
                for w in (() if measured is None else measured.waits)
            ],
        }
        return {
            "measured_ns": None if measured is None else measured.step_ns,
            "lanes": lanes,
            "stalls": stalls,
            "things": list(self.things.values()),
        }

    def _planned(self) -> Rows:
        """Lane → its spans in the last planned step; spans that cross its ends are clipped."""
        timeline = self.report.timeline
        if not timeline.steps:
            return {}
        begin_ns, end_ns = timeline.steps[-1]
        rows: Rows = {}
        for span in timeline.spans:
            if span.end_ns >= begin_ns and span.start_ns <= end_ns:
                start, end = max(span.start_ns, begin_ns), min(span.end_ns, end_ns)
                if end > start:
                    row = span.id, start - begin_ns, end - begin_ns
                    rows.setdefault(span.lane, []).append(row)
        return rows

    def _columns(self, rows: Iterable[Row]) -> dict[str, list[int]]:
        ordered = sorted(rows, key=lambda row: row[1:])
        starts = [start for _, start, _ in ordered]
        return {
            # differences between successive starts have fewer digits
            "start": [s - before for before, s in zip([0, *starts], starts, strict=False)],
            "duration": [end - start for _, start, end in ordered],
            "thing": [self._thing(name) for name, _, _ in ordered],
        }

    def _thing(self, name: str) -> int:
        if name not in self.place:
            self.place[name] = len(self.things)
            self.things[name] = self._about(name)
        return self.place[name]

    def _about(self, name: str) -> list[Any]:
        report = self.report
        labels = report.labels
        if move := self._moves.get(name):
            band = DRAWN[report.problem.tensor[move.tensor].kind]
            packed = f" as {move.codec}" if move.codec else ""
            what = f"{direction_of(move.source)}, {move.source} → {move.target}{packed}"
            nbytes = moved_bytes(report.problem, move.tensor, move.codec)
            label = tensor_name(move.tensor, labels, report.names)
            return [name, label, what, band, move.tensor, nbytes]
        again = self._again.get(name)
        op = report.problem.op.get(again or name)
        if name in self._reduced:
            what = "gradients reduced over ranks"
            return [name, name, what, DRAWN["gradient"], None, self._reduced[name]]
        if op is None:  # a measured phase
            return [name, "", name, name, None, 0]
        what = f"{op.phase}, run again" if again else op.phase
        return [name, path_in(labels.get(op.id, "")), what, op.phase, None, op.workspace_bytes]

    @cached_property
    def _moves(self) -> dict[str, Any]:
        return {move.id: move for move in self.report.plan.moves}

    @cached_property
    def _reduced(self) -> dict[str, int]:
        """Bucket → its bytes."""
        measured = self.report.measured_step
        spans = () if measured is None else measured.spans
        return {span.id: span.nbytes for span in spans if span.nbytes is not None}

    @cached_property
    def _again(self) -> dict[str, str]:
        return {run.id: run.op for run in self.report.plan.recomputes}

    @cached_property
    def _move_names(self) -> dict[str, str]:
        return move_names(self.report.plan, self.report.labels, self.report.names)

    def _waited(self, names: Iterable[str]) -> str:
        said = (self._move_names.get(n) or self.report.labels.get(n) or n for n in names)
        return ", ".join(said) or "what was under way"
