"""Writes to the log: `TORCH_LOGS=offcompile` logs one line per graph, `+offcompile` everything.

torch finds the logger by the package's name, so no registration is needed. Without the variable, it
is an ordinary logger of the standard library.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable

from offcompile.ir.textio import print_plan, print_problem
from offcompile.planning.timelines import print_timeline
from offcompile.runtime.base.once import first_time as first_time
from offcompile.runtime.base.progress import at_terminal

from .dump import Dumped, readable

LOGGER = logging.getLogger("offcompile")


def log_compiled(compiled: Dumped) -> None:
    """Log the certificate at INFO; at DEBUG also the graphs before and after, problem, plan, order
    and timeline."""
    report = compiled.report
    LOGGER.info("%s", report.summary(), stacklevel=2)
    if LOGGER.isEnabledFor(logging.DEBUG):
        for title, text in _parts(compiled):
            LOGGER.debug("%s: %s\n%s", report.name, title, text.rstrip(), stacklevel=2)
    trace_artifact(f"offcompile_{report.name}_summary", report.to_text)
    trace_artifact(f"offcompile_{report.name}_explained", report.explain)
    trace_artifact(f"offcompile_{report.name}", lambda: json.dumps(report.to_json()), "json")
    timeline = f"offcompile_{report.name}_timeline"
    trace_artifact(timeline, lambda: json.dumps(report.to_trace()), "json")


def log_decision(name: str, text: str) -> None:
    LOGGER.info("%s: %s", name, text, stacklevel=2)


def tell_once(text: str) -> None:
    if first_time("log", text):
        LOGGER.info("%s", text, stacklevel=2)


def say(text: str) -> None:
    """Log a line at INFO if enabled; otherwise print it if the user is at a terminal."""
    if LOGGER.isEnabledFor(logging.INFO):
        LOGGER.info("%s", text, stacklevel=2)
    elif LOGGER.isEnabledFor(logging.WARNING) and at_terminal():
        print(f"offcompile: {text}", file=sys.stderr)


def warn(text: str) -> None:
    """Log a warning, which is shown by default."""
    LOGGER.warning("offcompile: %s", text, stacklevel=2)


def _parts(compiled: Dumped) -> list[tuple[str, str]]:
    report = compiled.report
    return [
        *((f"{side} before", readable(module)) for side, module in compiled.before.items()),
        *((f"{side} after", readable(module)) for side, module in compiled.after.items()),
        ("problem", print_problem(report.problem)),
        ("plan", print_plan(report.plan)),
        *([("order", compiled.order)] if compiled.order is not None else []),
        ("timeline", print_timeline(report.machine, report.timeline)),
    ]


def trace_artifact(name: str, payload: Callable[[], str], encoding: str = "string") -> None:
    """Add a file to a `TORCH_TRACE`, for `tlparse`; calls `payload` only if a trace is recorded."""
    from torch._logging._internal import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name.replace(" ", "_"), "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )
