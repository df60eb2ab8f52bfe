"""Keeps how a graph was planned, so that later processes need not compare the ways again.

Planning compares a graph whole with pieces of it, masks as bits with masks as they are, weights on
the device with weights on the host. Each of these searches is kept (`planning.plan_cache`), but to
cut, rewrite and annotate the graph for each takes seconds. So the best candidate is kept as well,
in the form in which ranks pass it on (`answers`). It is taken like the plan of another rank:
simulated and checked anew, and one that does not fit the graph counts as absent.

Ops are measured again in later processes where the machine was busy, and what others hold differs
by a little, also when Dynamo traces a function again. Graphs would be compiled anew for another
plan. So the newest candidate of a graph is found for nearly the same budget and any costs too, is
timed with those of this process, and is left only for a plan that is worth compiling for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from offcompile.graph.graphs import Graphs
from offcompile.graph.split import Splits
from offcompile.ir import Infeasible, OffloadError, Problem
from offcompile.ir.jsonio import machine_to_json, problem_from_json, problem_to_json
from offcompile.machine.cost_cache import (
    digest_of,
    read_document,
    used_now,
    write_among,
)
from offcompile.passes.select.pinned_weights import weigh_little
from offcompile.planning.feedback.profiling import WORTH
from offcompile.planning.plan_cache import sources_digest
from offcompile.planning.planner import bounded, device_us, may_take_less
from offcompile.planning.splitting import SplitPart, Splitting, StepEstimate
from offcompile.run.ranks.figures import structure_of
from offcompile.runtime.memory.malloc.heap import address_space_is_limited

from .answers import TheirPlan, Unreadable, answer_of, read_answer
from .candidates import Candidate
from .pieces import best_candidate
from .planner import GraphPlanner, PlacementSearch
from .together import NotHere, taken

KIND = "candidate"
#: the question that was asked last about a graph
NEWEST_KIND = "newest-candidate"
#: processor time of a search that is worth a file
WORTH_KEEPING_SECONDS = 0.5
#: the least recently used candidates beyond this are deleted
MOST_BYTES, MOST_NEWEST_BYTES = 64 << 20, 1 << 20
#: budgets that differ by less than this factor may share a candidate
SAME_BUDGET = 1.005


@dataclass(frozen=True, eq=False)
class _Memory:
    """Candidates of one graph in the cache folder. `problem`: of the graph as it is given."""

    planner: GraphPlanner
    problem: Problem

    def read(self, question: str) -> Mapping[str, Any] | None:
        """What was kept for this question; None if nothing was."""
        identity = self._asked(question)
        kept = read_document(KIND, identity)
        if kept is not None:
            used_now(KIND, identity)
        return kept

    def newest(self) -> Iterator[Mapping[str, Any]]:
        """What was kept last for this graph, whatever its costs, with nearly the same budget."""
        own = _bin(self.planner.budget())
        for near in [own] if own is None else [own, own - 1, own + 1]:
            identity = self._graph(near)
            question = (read_document(NEWEST_KIND, identity) or {}).get("question")
            if isinstance(question, str) and (kept := self.read(question)) is not None:
                used_now(NEWEST_KIND, identity)
                yield kept

    def keep(self, question: str, found: Candidate) -> None:
        splitting = found.choice.splitting
        said = None if splitting is None else _splitting_to_json(splitting)
        content = {"answer": answer_of(found), "splitting": said}
        write_among(KIND, self._asked(question), content, MOST_BYTES)
        identity = self._graph(_bin(self.planner.budget()))
        write_among(NEWEST_KIND, identity, {"question": question}, MOST_NEWEST_BYTES)

    def question(self) -> str:
        """Hash all that decides which candidate is best."""
        planner, source, budget = self.planner, self.planner.source, self.planner.budget()
        room = _room(_bin(budget))
        parts = [
            problem_to_json(self.problem),
            machine_to_json(source.machine(room)),
            [planner.host_bytes(), budget and planner.places_blocks(budget)],
            [source.profile.lacks_room, source.touch_again_us_per_mib],
            [source.target.library_bytes, source.target.reserve_bytes(room)],
            [source.target.holes_bytes(room), repr(source.target.room(room))],
        ]
        return digest_of([*self._settings(), budget is None, *parts])

    def _asked(self, question: str) -> dict[str, str | int | bool]:
        return {"sources": sources_digest(), "question": question}

    def _graph(self, budget_bin: int | None) -> dict[str, str | int | bool]:
        """Name the graph and all that was asked, but for budgets that are nearly the same, and
        for figures that were measured."""
        options, device = self.planner.source.options, self.planner.source.target.device
        parts = [structure_of(self.problem), repr(options.hardware), str(device), budget_bin]
        return {"sources": sources_digest(), "graph": digest_of([*self._settings(), *parts])}

    def _settings(self) -> list[Any]:
        request, options = self.planner.request, self.planner.source.options
        return [
            [options.lowering, options.whole_policy, options.split, options.minimum],
            [options.seconds, address_space_is_limited()],
            [list(request.kind), request.quick, request.updated_there],
            [sorted(who) for who in (request.taken.updated, request.taken.reduced, request.fixed)],
            sorted((str(symbol), value) for symbol, value in request.sizes.items()),
        ]


def remembered_candidate(planner: GraphPlanner, given: Graphs, splits: Splits | None) -> Candidate:
    """Plan the graphs as an earlier process has planned them, or else in the best way, which is
    kept. Raises `Infeasible`."""
    request, source = planner.request, planner.source
    if not source.options.reuse_plans or request.settled is not None or request.beside is not None:
        return best_candidate(planner, given, splits)
    plain = source.annotate(given, planner.budget(), planner.tell)
    planner = replace(planner, priced=(given, plain))
    memory = _Memory(planner, plain.problem)
    question = memory.question()
    kept = memory.read(question)
    if kept is not None and (found := _restored(kept, planner, given, splits)) is not None:
        return found
    busy_from = time.thread_time()
    restored = (_restored(kept, planner, given, splits, anew=True) for kept in memory.newest())
    earlier = next((made for made in restored if made is not None), None)
    found = _best_beside(earlier, planner, given, splits)
    if earlier is not None or time.thread_time() - busy_from >= WORTH_KEEPING_SECONDS:
        memory.keep(question, found)
    return found


def _restored(
    kept: Mapping[str, Any],
    planner: GraphPlanner,
    given: Graphs,
    splits: Splits | None,
    anew: bool = False,
) -> Candidate | None:
    """The candidate that was kept, for these graphs; None if it is damaged or does not fit them.
    anew: timed and bounded with the costs of this process."""
    try:
        answer, said = read_answer(kept["answer"]), kept["splitting"]
        if not isinstance(answer, TheirPlan):
            return None
        splitting = None if said is None else _splitting_from_json(said)
        found = taken(answer, planner, given, splits, splitting, anew)
    except (NotHere, Unreadable, OffloadError, LookupError, TypeError, ValueError):
        return None
    result = replace(found.choice.decided.result, reused=True)
    if anew:
        problem, machine = found.choice.annotated.problem, found.choice.decided.machine
        result = bounded(problem, machine, result, planner.seconds(problem))
    decided = replace(found.choice.decided, result=result)
    return replace(found, choice=replace(found.choice, decided=decided))


def _best_beside(
    earlier: Candidate | None, planner: GraphPlanner, given: Graphs, splits: Splits | None
) -> Candidate:
    """The candidate of an earlier process, or a better one that is worth compiling for."""
    if earlier is None:
        return best_candidate(planner, given, splits)
    worth, before = WORTH[planner.source.options.lowering], earlier.choice.decided
    enough_us = before.cost_us * (1 - worth)
    if enough_us <= before.bound_us and not _elsewhere(earlier, planner, given, enough_us):
        return earlier
    try:
        found = best_candidate(planner, given, splits)
    except Infeasible:
        return earlier
    now = found.choice.decided
    smaller = planner.budget() is None and now.order.peak_bytes < before.order.peak_bytes
    return found if smaller or now.cost_us < enough_us else earlier


def _elsewhere(earlier: Candidate, planner: GraphPlanner, given: Graphs, worth_us: float) -> bool:
    """True if a plan with the weights in another place may take less than this."""
    at_home, machine = planner.annotated(given), earlier.choice.decided.machine
    problem = at_home.problem
    if worth_us <= device_us(problem):
        return False
    if earlier.choice.stays is None:
        if weigh_little(problem, machine):
            return False
        own = replace(planner, source=replace(planner.source))
        on_host = PlacementSearch(own, given, at_home).on_host(frozenset())
        if on_host is None:
            return False
        problem = on_host.problem
    return may_take_less(problem, machine, worth_us, planner.seconds(problem))


def _bin(budget: int | None) -> int | None:
    """Number budgets so that nearly the same ones have the same number, or neighbours."""
    return None if budget is None else int(math.log(budget, SAME_BUDGET))


def _room(budget_bin: int | None) -> int:
    """The budget of that number; 1 if there is none."""
    return 1 if budget_bin is None else int(SAME_BUDGET**budget_bin)


def _splitting_to_json(splitting: Splitting) -> dict[str, Any]:
    steps = splitting.whole, splitting.split
    return {
        "pieces": splitting.pieces,
        "parts": [asdict(part) for part in splitting.parts],
        "steps": [[problem_to_json(step.problem), step.floor_bytes] for step in steps],
    }


def _splitting_from_json(said: Mapping[str, Any]) -> Splitting:
    parts = (SplitPart(**{**part, "products": tuple(part["products"])}) for part in said["parts"])
    whole, split = (StepEstimate(problem_from_json(p), int(floor)) for p, floor in said["steps"])
    return Splitting(int(said["pieces"]), tuple(parts), whole, split)
