"""Writes reports as one self-contained page for any browser: no network, nothing to install."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Sequence
from hashlib import sha256
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from offcompile.ir import DEVICE, Machine, OffloadError, Problem
from offcompile.planning.planner import PlanResult
from offcompile.report.figures import PlannedMemory
from offcompile.report.record import Record

from .data import report_data

#: scripts in the order in which they run
SCRIPTS = ("units.js", "view.js", "memory.js", "lanes.js", "tables.js", "main.js")


def save_html(path: str | Path, reports: Sequence[Record]) -> None:
    """Write the page of `reports`."""
    if not reports:
        raise OffloadError(
            "There is nothing to report yet: no graph was compiled with backend='offcompile' in "
            "this process. Run a step of the compiled model first, then save the page."
        )
    text = page(reports)
    try:
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise OffloadError(f"The page cannot be written: {error}") from error


def save_plan(
    path: str | Path, name: str, problem: Problem, machine: Machine, result: PlanResult
) -> None:
    """Write the page of a plan that has not run yet."""
    capacity = machine.tier[DEVICE].capacity_bytes
    held = result.timeline.peak_bytes[DEVICE]
    save_html(path, [Record(name, problem, machine, result, PlannedMemory(capacity or held))])


def page(reports: Sequence[Record]) -> str:
    """The whole page as HTML."""
    return fill({"reports": [report_data(report) for report in reports]})


def fill(data: dict[str, Any]) -> str:
    """The page with the data from `report_data`. Its content security policy allows only its own
    scripts and styles."""
    style, script = _static("page.css"), "\n".join(_static(name) for name in SCRIPTS)
    title = ", ".join(report["name"] for report in data["reports"])
    parts = {
        "title": escape(f"{title} · offcompile"),
        "policy": f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; "
        "base-uri 'none'; form-action 'none'",
        "style": style,
        "data": embedded(data),
        "script": script,
    }
    text = _static("page.html")
    for name, part in parts.items():
        before, mark, after = text.partition(f"{{{{{name}}}}}")
        if not mark:
            raise LookupError(f"page.html has no place for {name}")
        # text that was filled in is not searched again
        parts[name], text = before + part, after
    return "".join(parts.values()) + text


def embedded(data: dict[str, Any]) -> str:
    """JSON that cannot close its enclosing HTML element, whatever names it contains."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _static(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
