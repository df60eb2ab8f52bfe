"""Writes one compiled graph to files: its graphs, problem, machine, plan and timeline."""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offcompile.ir import InvalidInput, OffloadError, Violation
from offcompile.ir.jsonio import machine_to_json, plan_to_json, problem_to_json
from offcompile.ir.textio import print_plan, print_problem
from offcompile.planning.timelines import print_timeline, timeline_to_json

from .drawing.dot import draw, to_dot
from .drawing.svg import to_svg
from .report import PlanReport

if TYPE_CHECKING:
    from torch import fx

#: "forward" and "backward" → graph; inference has no backward
Sides = Mapping[str, "fx.GraphModule"]
#: suffix that `annotate` adds to the id of a backward op if forward has a node of that name
BACKWARD_SUFFIX = ".bw"


@dataclass(frozen=True)
class Dumped:
    """One compiled graph before and after the rewrite, with its report."""

    report: PlanReport
    before: Sides
    #: the sides that changed
    after: Sides
    #: the static order of runs, starts and waits, as text
    order: str | None = None
    #: the sides before they were split along tokens, if they were
    whole: Sides = field(default_factory=dict)


def check_dump_directory(directory: Path) -> None:
    """Create the directory and test a write to it. Raises `InvalidInput` before any work starts."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"offcompile")
    except OSError as error:
        detail = f"{str(directory)!r} cannot be written to: {error.strerror or error}; name another"
        raise InvalidInput([Violation("bad-value", "option dump", detail)]) from error


def dump(directory: Path, name: str, compiled: Dumped) -> Path:
    """Write the files to a new folder `<directory>/<name>-NN`, and return the folder."""
    try:
        folder = _new_folder(directory, name)
        for file, text in files(compiled):
            (folder / file).write_text(text(), "utf-8")
    except OSError as error:
        raise OffloadError(
            f"The dump of {name} cannot be written to {str(directory)!r}: "
            f"{error.strerror or error}. Make room there, name another directory, or leave the "
            "option dump out."
        ) from error
    return folder


def _new_folder(directory: Path, name: str) -> Path:
    plain = re.sub(r"[^\w.+=-]+", "_", name).strip(".") or "graph"
    directory.mkdir(parents=True, exist_ok=True)
    for number in itertools.count():
        folder = directory / f"{plain}-{number:02d}"
        try:
            folder.mkdir()  # fails if it exists, so two processes cannot both take it
        except FileExistsError:
            continue
        return folder
    raise AssertionError("there is always another number")


def files(compiled: Dumped) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each file's name and a function that makes its text."""
    report = compiled.report
    for side, given in compiled.whole.items():
        yield f"{side}_whole.py", partial(readable, given)
    for side, given in compiled.before.items():
        module = compiled.after.get(side, given)
        yield f"{side}_before.py", partial(readable, given)
        yield f"{side}_after.py", partial(readable, module)
        drawing = draw(
            module.graph,
            f"{report.name}, {side}",
            _durations_us(report, side),
            [lane.name for lane in report.machine.lanes],
        )
        yield f"{side}.dot", partial(to_dot, drawing)
        yield f"{side}.svg", partial(to_svg, drawing)
    problem, machine, plan = report.problem, report.machine, report.plan
    yield "problem.json", lambda: _json(problem_to_json(problem))
    yield "problem.txt", lambda: print_problem(problem)
    if report.splitting is not None:
        whole = report.splitting.whole.problem
        yield "problem_whole.json", lambda: _json(problem_to_json(whole))
        yield "problem_whole.txt", lambda: print_problem(whole)
    yield "machine.json", lambda: _json(machine_to_json(machine))
    yield "plan.json", lambda: _json(plan_to_json(plan))
    yield "plan.txt", lambda: print_plan(plan)
    yield "timeline.json", lambda: _json(timeline_to_json(report.timeline))
    yield "timeline.txt", lambda: print_timeline(machine, report.timeline)
    yield "report.txt", lambda: f"{report.to_text()}\n\n{report.explain()}\n"
    if compiled.order is not None:
        order = compiled.order
        yield "order.txt", lambda: f"{order.rstrip()}\n"


def readable(module: fx.GraphModule) -> str:
    """The graph as readable Python, with the shapes of values."""
    text: str = module.print_readable(print_output=False)
    return f"{text.rstrip()}\n"


def _durations_us(report: PlanReport, side: str) -> dict[str, float]:
    """Node name → duration, for the ops of one side."""
    return {
        op.id.removesuffix(BACKWARD_SUFFIX) if side == "backward" else op.id: op.duration_us
        for op in report.problem.ops
        if op.phase == side
    }


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
