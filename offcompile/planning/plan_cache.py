"""Keeps plans in the user's cache folder, so that the same step is searched for only once.

A plan is found again only for the same problem, machine, policy, time and rivals, by the same
planner: its sources are part of the key. It is verified and simulated anew before it is used, and
one that is damaged counts as absent. Searches that end quickly are not kept: the clock cut none of
them off, so they find the same plan again. Any other might find another one, and graphs would be
compiled for it again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from offcompile.ir import BrokenPlan, Infeasible, InvalidInput
from offcompile.ir.jsonio import machine_to_json, plan_from_json, plan_to_json, problem_to_json
from offcompile.machine.cost_cache import (
    digest_of,
    read_document,
    used_now,
    write_among,
)
from offcompile.runtime.base.interpreter import in_large_chunk
from offcompile.runtime.base.once import made_once

from .planner import Beaten, PlanAsked, PlanResult, beside_us, certify, plan_asked

#: rooms of the package whose sources decide what a search finds
PLANNER = ("ir", "passes", "simulate", "bounds", "outline", "planning")
KIND = "plan"
#: processor time of a search that is worth a file
WORTH_KEEPING_SECONDS = 0.1
#: the least recently used plans beyond this are deleted
MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Question(PlanAsked):
    """Everything that decides which plan a search finds."""

    @property
    def key(self) -> str:
        figures = [self.policy, self.seconds, self.worth_us, self.trial, self.begun_us]
        parts = [
            problem_to_json(self.problem),
            machine_to_json(self.machine),
            [plan_to_json(plan) for plan in self.known],
            [repr(figure) for figure in figures],
            None if self.beside is None else self.beside.digest(self.problem),
        ]
        return digest_of(parts)

    @in_large_chunk
    def answered(self, progress: Callable[[str], None] | None = None) -> PlanResult:
        """Search now. Raises what `plan_asked` raises."""
        return plan_asked(self, progress)


def plan_once(question: Question, progress: Callable[[str], None] | None = None) -> PlanResult:
    """The plan of an earlier search for the same question, or else of a search now, which is kept.
    Raises what `plan_asked` raises, remembered refusals too."""
    busy_from = time.thread_time()
    identity = {"planner": planner_digest(), "question": question.key}
    kept = read_document(KIND, identity)
    if kept is not None and (made := _restored(question, kept)) is not None:
        used_now(KIND, identity)
        return made

    def keep(content: dict[str, object]) -> None:
        if time.thread_time() - busy_from >= WORTH_KEEPING_SECONDS:
            write_among(KIND, identity, content, MOST_BYTES)

    try:
        made = question.answered(progress)
    except (Beaten, Infeasible) as error:
        keep(_refusal(error))
        raise
    keep(_plan(made))
    return made


def _plan(made: PlanResult) -> dict[str, object]:
    return {
        "plan": plan_to_json(made.plan),
        "seconds": made.seconds,
        "lower_bound_us": made.lower_bound_us,
        "bound_method": made.bound_method,
    }


def _refusal(error: Beaten | Infeasible) -> dict[str, object]:
    if isinstance(error, Beaten):
        return {"beaten": True}
    return {"infeasible": [error.reason, error.needed_bytes, error.smallest_change]}


def _restored(question: Question, kept: dict[str, object]) -> PlanResult | None:
    """The plan that was kept, verified and simulated; None if it is damaged. Raises the refusal
    that was kept instead."""
    if kept.get("beaten") is True:
        raise Beaten
    match kept.get("infeasible"):
        case [str(reason), int() | None as needed_bytes, str(change)]:
            raise Infeasible(reason, needed_bytes, change)
    bound_us, method = kept.get("lower_bound_us"), kept.get("bound_method")
    seconds = kept.get("seconds")
    if not (isinstance(bound_us, float) and isinstance(seconds, float) and isinstance(method, str)):
        return None
    try:
        plan = plan_from_json(kept.get("plan"))
        timeline = certify(question.problem, question.machine, plan, question.policy)
    except (InvalidInput, BrokenPlan, Infeasible):
        return None
    beside = beside_us(question, plan)
    return PlanResult(plan, timeline, question.policy, seconds, bound_us, method, True, beside)


def planner_digest() -> str:
    """Changes whenever a source of the planner changes."""
    return _digest(PLANNER)


def sources_digest() -> str:
    """Changes whenever a source that plans or rewrites graphs changes."""
    return _digest((*PLANNER, "machine", "graph", "run"))


def _digest(rooms: tuple[str, ...]) -> str:
    def digest() -> str:
        found = hashlib.sha256()
        for path in _sources(rooms):
            found.update(path.read_bytes())
        return found.hexdigest()[:16]

    return made_once("digest of sources", rooms, digest)


def _sources(rooms: tuple[str, ...]) -> Iterator[Path]:
    package = Path(__file__).parents[1]
    for room in rooms:
        yield from sorted((package / room).resolve().rglob("*.py"))
