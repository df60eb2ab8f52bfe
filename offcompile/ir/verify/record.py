"""Checks that a record is complete: every span once, of the right length, in lane order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from offcompile.ir.errors import Violation
from offcompile.ir.model import Machine, Problem
from offcompile.ir.plan import COMPUTE, HOST_COMPUTE, Move, Plan, Span, Timeline

from .order import VerifiedRun, executed, move_duration_ns

MAX_STEPS = 8  # a steady problem that has not settled by then is reported as unsettled

Key = tuple[int, str]  # step, id


@dataclass(frozen=True)
class Task:
    """A run or a move that the plan asks for in one step, with its span if it was recorded."""

    step: int
    id: str
    lane: str
    duration_ns: int
    run: VerifiedRun | None
    move: Move | None
    span: Span | None

    @property
    def where(self) -> str:
        kind = "move" if self.move else "op"
        return f"{kind} {self.id}, step {self.step}"

    @property
    def wraps(self) -> bool:
        return self.move is not None and self.move.wraps


def lane_names(machine: Machine) -> tuple[str, ...]:
    """Every lane, in the order in which lanes are served at the same instant."""
    return (COMPUTE, HOST_COMPUTE, *(lane.name for lane in machine.lanes))


def queues(
    problem: Problem, machine: Machine, plan: Plan, timeline: Timeline
) -> dict[str, list[Task]]:
    """The tasks of each lane over all recorded steps, in order."""
    spans = {(s.step, s.id): s for s in timeline.spans}
    found: dict[str, list[Task]] = {name: [] for name in lane_names(machine)}
    runs = [(r, r.duration_ns()) for r in executed(problem, plan)]
    moves = [(m, move_duration_ns(problem, machine, m)) for m in plan.moves]
    for step in range(len(timeline.steps)):
        for run, ns in runs:
            span = spans.get((step, run.id))
            found[run.lane].append(Task(step, run.id, run.lane, ns, run, None, span))
        for move, ns in moves:
            span = spans.get((step, move.id))
            found[move.lane].append(Task(step, move.id, move.lane, ns, None, move, span))
    return found


def check_record(
    problem: Problem, machine: Machine, timeline: Timeline, todo: dict[str, list[Task]]
) -> Iterator[Violation]:
    """Checks that the spans are complete, exact and in order, before any copy is checked.

    How long moves over shared links last is left to `paces`.
    """
    yield from _steps(problem, timeline)
    known = {(t.step, t.id): t for tasks in todo.values() for t in tasks}
    seen: set[Key] = set()
    for span in timeline.spans:
        key = (span.step, span.id)
        where = f"{span.id}, step {span.step}"
        if key not in known:
            yield Violation("unknown-id", where, "the plan asks for no such thing in this step")
        elif key in seen:
            yield Violation("duplicate-id", where, "it is in the record twice")
        elif span.lane != known[key].lane:
            detail = f"recorded on lane {span.lane}; it belongs on {known[key].lane}"
            yield Violation("wrong-lane", where, detail)
        seen.add(key)
    crossing = {name for link in machine.shared for name in link.lanes}
    for lane, tasks in todo.items():
        for task in tasks:
            yield from _span(task, timeline, lane not in crossing)
        for first, then in pairwise(tasks):
            yield from _succession(first, then)
    for step in range(len(timeline.steps)):
        yield from _step_end(step, timeline, known)


def _steps(problem: Problem, timeline: Timeline) -> Iterator[Violation]:
    count = len(timeline.steps)
    if problem.steady:
        if not 2 <= count <= MAX_STEPS:
            detail = f"{count} steps simulated; a steady problem needs 2 to {MAX_STEPS}"
            yield Violation("steady", "steps", detail)
    elif count != 1:
        yield Violation("bad-value", "steps", f"{count} steps; a problem that is not steady has 1")
    if timeline.steps and timeline.steps[0][0] != 0:
        yield Violation("bad-value", "step 0", f"begins at {timeline.steps[0][0]} ns, not at 0")
    for index, (step, following) in enumerate(pairwise(timeline.steps)):
        if step[1] != following[0]:
            detail = f"begins at {following[0]} ns; the step before it ends at {step[1]} ns"
            yield Violation("bad-value", f"step {index + 1}", detail)


def _span(task: Task, timeline: Timeline, exactly: bool) -> Iterator[Violation]:
    last = len(timeline.steps) - 1
    if task.span is None:
        if not (task.wraps and task.step == last):
            yield Violation("deadlock", task.where, "it never ran")
        return
    start, end = task.span.start_ns, task.span.end_ns
    if end - start < task.duration_ns or (exactly and end - start > task.duration_ns):
        detail = f"lasted {end - start} ns; the contract gives {task.duration_ns} ns"
        yield Violation("bad-value", task.where, detail)
    if start < timeline.steps[task.step][0]:
        detail = f"starts at {start} ns, before its step ({timeline.steps[task.step][0]} ns)"
        yield Violation("bad-value", task.where, detail)
    by_step = task.step + task.wraps
    if by_step <= last and end > timeline.steps[by_step][1]:
        detail = f"ends at {end} ns, after step {by_step} ({timeline.steps[by_step][1]} ns)"
        yield Violation("late-move" if task.move else "bad-value", task.where, detail)


def _succession(first: Task, then: Task) -> Iterator[Violation]:
    if then.span is None:
        return
    if first.span is None:
        yield Violation("bad-value", then.where, f"ran, but {first.id} before it on its lane not")
    elif then.span.start_ns < first.span.end_ns:
        detail = (
            f"starts at {then.span.start_ns} ns, before {first.id}, its predecessor on lane "
            f"{then.lane}, ends at {first.span.end_ns} ns"
        )
        yield Violation("bad-value", then.where, detail)


def _step_end(step: int, timeline: Timeline, known: dict[Key, Task]) -> Iterator[Violation]:
    begin, end = timeline.steps[step]
    awaited = [
        t.span.end_ns for t in known.values() if t.span is not None and t.step + t.wraps == step
    ]
    due = max([begin, *awaited])
    if end != due:
        detail = f"ends at {end} ns; what it waits for has ended at {due} ns"
        yield Violation("bad-value", f"step {step}", detail)


def check_makespan(
    machine: Machine, timeline: Timeline, todo: dict[str, list[Task]], links_ns: int
) -> Iterator[Violation]:
    """Checks the makespan: the last step's length or, if unsettled, the longest work of a lane or
    of a shared link (`links_ns`)."""
    begin, end = timeline.steps[-1]
    due = end - begin
    if not timeline.settled:
        for lane in machine.lanes:
            due = max(due, sum(t.duration_ns for t in todo[lane.name] if t.step == 0))
        due = max(due, links_ns)
    if timeline.makespan_us != due / 1000:
        detail = f"{timeline.makespan_us} µs; the record gives {due / 1000} µs"
        yield Violation("bad-value", "makespan_us", detail)


def relative_times(timeline: Timeline, step: int) -> frozenset[tuple[str, int]]:
    """Everything that starts before the step ends, by its time from the step's start."""
    begin, end = timeline.steps[step]
    return frozenset(
        (s.id, s.start_ns - begin)
        for s in timeline.spans
        if s.step == step and (s.start_ns < end or s.end_ns == end)
    )
