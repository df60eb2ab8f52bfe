"""Traces as JSON and as lines of text, one run per line.

    block w0 453000000
    run layer 1200.0 on L0 reads w0 x writes a0 dead x

The JSON form uses the same words: `{"blocks": [{"id", "nbytes"}], "runs": [{"graph", "duration_us",
"binding", "reads", "writes", "dead"}]}`; `binding` and `dead` may be left out.
"""

from __future__ import annotations

from typing import Any

from ._read import BYTES, IDENT, MICROSECONDS, Entry, Report, show
from .jsonio import loads_json
from .textio import Line, parse_lines, print_lines
from .trace import Block, Run, Trace

_BLOCK = ("id", "nbytes")
_RUN = ("graph", "duration_us", "binding", "reads", "writes", "dead")
_TRACE = {
    "block": Line("blocks", ("id", "nbytes")),
    "run": Line(
        "runs",
        ("graph", "duration_us"),
        {"on": "binding", "reads": "reads", "writes": "writes", "dead": "dead"},
    ),
}


def trace_from_json(obj: object) -> Trace:
    """The trace that parsed JSON describes. Raises `InvalidInput` with every fault."""
    report = Report()
    top = Entry(report, obj, "", "trace", ("blocks", "runs"))
    entries = list(top.entries("blocks", "block", _BLOCK))
    blocks = tuple(Block(e.required("id", IDENT), e.required("nbytes", BYTES)) for e in entries)
    known = report.unique((e.at("id"), b.id) for e, b in zip(entries, blocks, strict=True))
    runs = tuple(_run(e, known) for e in top.entries("runs", "run", _RUN))
    report.check()
    trace = Trace(blocks, runs)
    _check_lives(report, trace)
    report.check()
    return trace


def _run(entry: Entry, known: dict[str, str]) -> Run:
    run = Run(
        entry.required("graph", IDENT),
        entry.required("duration_us", MICROSECONDS),
        entry.optional("binding", IDENT, None),
        entry.many("reads", IDENT),
        entry.many("writes", IDENT),
        entry.many("dead", IDENT) if "dead" in entry.raw else (),
    )
    for key, names in (("reads", run.reads), ("writes", run.writes), ("dead", run.dead)):
        for i, name in enumerate(names):
            entry.report.known(f"{entry.at(key)}[{i}]", name, "block", known)
    return run


def _check_lives(report: Report, trace: Trace) -> None:
    """Checks that a dead block, which holds nothing, is written before it is read again."""
    died: dict[str, int] = {}
    for i, run in enumerate(trace.runs):
        for name in run.reads:
            if name in died:
                detail = (
                    f"{show(name)} is read, but runs[{died[name]}] says that it is dead; "
                    "write it before, or take it out of that `dead`"
                )
                report.add("missing-copy", f"runs[{i}].reads", detail)
        for name in run.writes:
            died.pop(name, None)
        died.update(dict.fromkeys(run.dead, i))


def trace_to_json(trace: Trace) -> dict[str, Any]:
    return {
        "blocks": [{"id": b.id, "nbytes": b.nbytes} for b in trace.blocks],
        "runs": [
            {
                "graph": r.graph,
                "duration_us": r.duration_us,
                "binding": r.binding,
                "reads": list(r.reads),
                "writes": list(r.writes),
                "dead": list(r.dead),
            }
            for r in trace.runs
        ],
    }


def loads_trace(text: str) -> Trace:
    """Read the JSON text of a trace."""
    return trace_from_json(loads_json(text, "trace"))


def print_trace(trace: Trace) -> str:
    return print_lines(trace_to_json(trace), _TRACE)


def parse_trace(text: str) -> Trace:
    """Read the lines of a trace."""
    return parse_lines(text, _TRACE, trace_from_json)
