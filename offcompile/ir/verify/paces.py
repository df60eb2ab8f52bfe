"""Checks how long moves over shared links last, given everything that ran beside them.

Ops and host updates take their share of a link first; moves share the rest in proportion to the
rates of their lanes. Speeds are whole millionths, rounded down; shares are rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise

from offcompile.ir.errors import Violation
from offcompile.ir.model import Machine, Problem, SharedLink
from offcompile.ir.plan import Timeline
from offcompile.ir.units import exact

from .order import link_us
from .record import Task

WHOLE = 1_000_000


def check_paces(
    problem: Problem, machine: Machine, timeline: Timeline, todo: dict[str, list[Task]]
) -> Iterator[Violation]:
    """Compares the recorded end of each move over a shared link with the work that it had done."""
    crossing = {name for link in machine.shared for name in link.lanes}
    tasks = [t for found in todo.values() for t in found if t.span is not None]
    lasting = [t for t in tasks if _end(t) > _start(t)]
    instants = sorted({x for t in lasting for x in (_start(t), _end(t))})
    waiting = sorted(lasting, key=_start, reverse=True)
    over = timeline.steps[-1][1]
    shares = _Shares(problem, machine)
    running: list[Task] = []
    left: dict[Task, int] = {}
    for now, then in pairwise(instants):
        running = [t for t in running if _end(t) > now]
        while waiting and _start(waiting[-1]) == now:
            running.append(waiting.pop())
        moves = [t for t in running if t.lane in crossing and _start(t) < over]
        paces = _paces(shares, running, moves) if moves else {}
        for task in moves:
            pace = paces[task]
            left[task] = left.get(task, task.duration_ns * WHOLE) - pace * (then - now)
            if _end(task) == then and then <= over and not -pace < left[task] <= 0:
                done = 1 - Fraction(left[task], max(1, task.duration_ns * WHOLE))
                detail = f"ends at {then} ns with {float(done):.4%} of its work done"
                yield Violation("bad-value", task.where, detail)
    for task in lasting:
        least = _start(task) + task.duration_ns
        if task.lane in crossing and _end(task) > over and _end(task) < least:
            detail = f"ends at {_end(task)} ns; even at full speed it lasts to {least} ns"
            yield Violation("bad-value", task.where, detail)


def link_work_ns(problem: Problem, link: SharedLink, machine: Machine, tasks: list[Task]) -> int:
    """The time for which the tasks of a step take the whole rate of a link."""
    total, shares = 0, _Shares(problem, machine)
    for task in tasks:
        if task.run is not None:
            total += shares.of_run(link, task) * task.duration_ns
        elif task.lane in link.lanes:
            total += shares.of_lane(link, task.lane) * task.duration_ns
    return total // WHOLE


@dataclass(frozen=True)
class _Shares:
    """The shares of a link that runs and moves ask for; each is computed once."""

    problem: Problem
    machine: Machine
    _of_lanes: dict[tuple[str, str], int] = field(default_factory=dict)
    _of_runs: dict[tuple[str, str], int] = field(default_factory=dict)

    def of_lane(self, link: SharedLink, lane: str) -> int:
        if (link.name, lane) not in self._of_lanes:
            rate = exact(self.machine.lane[lane].bytes_per_us) / exact(link.bytes_per_us)
            share = min(math.ceil(rate * WHOLE), WHOLE * WHOLE // len(link.lanes))
            self._of_lanes[link.name, lane] = share
        return self._of_lanes[link.name, lane]

    def of_run(self, link: SharedLink, task: Task) -> int:
        if task.run is None or not task.duration_ns:
            return 0
        if (link.name, task.id) not in self._of_runs:
            us = link_us(self.problem, link, task.run)
            asked = math.ceil(us * 1000 * WHOLE / task.duration_ns)
            self._of_runs[link.name, task.id] = min(WHOLE, asked)
        return self._of_runs[link.name, task.id]


def _paces(shares: _Shares, running: list[Task], moves: list[Task]) -> dict[Task, int]:
    paces = dict.fromkeys(moves, WHOLE)
    for link in shares.machine.shared:
        taken = sum(shares.of_run(link, t) for t in running if t.run is not None)
        asked = {t: shares.of_lane(link, t.lane) for t in moves if t.lane in link.lanes}
        for task in asked:
            free = max(0, WHOLE - taken)
            paces[task] = min(paces[task], free * WHOLE // sum(asked.values()))
    return paces


def _start(task: Task) -> int:
    return task.span.start_ns if task.span is not None else 0


def _end(task: Task) -> int:
    return task.span.end_ns if task.span is not None else 0
