"""Keeps how a graph was planned, so that later processes need not compare the ways again.

Planning compares a graph whole with pieces of it, masks as bits with masks as they are, weights on
the device with weights on the host. Each of these searches is kept (`planning.plan_cache`), but to
cut, rewrite and annotate the graph for each takes seconds. So the best candidate is kept as well,
in the form in which ranks pass it on (`answers`). It is taken like the plan of another rank:
simulated and checked anew, and one that does not fit the graph counts as absent.

Budgets that are nearly the same share a candidate, if it fits: what others hold differs by a little
from run to run, and when Dynamo traces a function again. Another plan would be compiled anew.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from offcompile.graph.graphs import Graphs
from offcompile.graph.split import Splits
from offcompile.ir import OffloadError, Problem
from offcompile.ir.jsonio import machine_to_json, problem_from_json, problem_to_json
from offcompile.machine.cost_cache import (
    digest_of,
    read_document,
    used_now,
    write_among,
)
from offcompile.planning.plan_cache import sources_digest
from offcompile.planning.splitting import SplitPart, Splitting, StepEstimate
from offcompile.runtime.memory.malloc.heap import address_space_is_limited

from .answers import TheirPlan, Unreadable, answer_of, read_answer
from .candidates import Candidate
from .pieces import best_candidate
from .planner import GraphPlanner
from .together import NotHere, taken

KIND = "candidate"
#: processor time of a search that is worth a file
WORTH_KEEPING_SECONDS = 0.5
#: the least recently used candidates beyond this are deleted
MOST_BYTES = 64 << 20
#: budgets that differ by less than this factor may share a candidate
SAME_BUDGET = 1.005


def remembered_candidate(planner: GraphPlanner, given: Graphs, splits: Splits | None) -> Candidate:
    """Plan the graphs as an earlier process has planned them, or else in the best way, which is
    kept. Raises `Infeasible`."""
    request, source = planner.request, planner.source
    if not source.options.reuse_plans or request.settled is not None or request.beside is not None:
        return best_candidate(planner, given, splits)
    plain = source.annotate(given, planner.budget(), planner.tell)
    planner = replace(planner, priced=(given, plain))
    identity = {"sources": sources_digest(), "question": _question(planner, plain.problem)}
    kept = read_document(KIND, identity)
    if kept is not None and (found := _restored(kept, planner, given, splits)) is not None:
        used_now(KIND, identity)
        return found
    busy_from = time.thread_time()
    found = best_candidate(planner, given, splits)
    if time.thread_time() - busy_from >= WORTH_KEEPING_SECONDS:
        splitting = found.choice.splitting
        said = None if splitting is None else _splitting_to_json(splitting)
        write_among(KIND, identity, {"answer": answer_of(found), "splitting": said}, MOST_BYTES)
    return found


def _restored(
    kept: Mapping[str, Any], planner: GraphPlanner, given: Graphs, splits: Splits | None
) -> Candidate | None:
    """The candidate that was kept, for these graphs; None if it is damaged or does not fit them."""
    try:
        answer, said = read_answer(kept["answer"]), kept["splitting"]
        if not isinstance(answer, TheirPlan):
            return None
        splitting = None if said is None else _splitting_from_json(said)
        found = taken(answer, planner, given, splits, splitting)
    except (NotHere, Unreadable, OffloadError, LookupError, TypeError, ValueError):
        return None
    choice, decided = found.choice, found.choice.decided
    decided = replace(decided, result=replace(decided.result, reused=True))
    return replace(found, choice=replace(choice, decided=decided))


def _question(planner: GraphPlanner, problem: Problem) -> str:
    """Hash all that decides which candidate is best. `problem`: of the graph as it is given."""
    request, source, budget = planner.request, planner.source, planner.budget()
    options, target = source.options, source.target
    room = 1 if budget is None else int(SAME_BUDGET ** int(math.log(budget, SAME_BUDGET)))
    parts = [
        problem_to_json(problem),
        machine_to_json(source.machine(room)),
        [budget is None, planner.host_bytes(), budget and planner.places_blocks(budget)],
        [options.lowering, options.whole_policy, options.split, options.minimum, options.seconds],
        [list(request.kind), request.quick, request.updated_there],
        [sorted(who) for who in (request.taken.updated, request.taken.reduced, request.fixed)],
        sorted((str(symbol), value) for symbol, value in request.sizes.items()),
        [source.profile.lacks_room, source.touch_again_us_per_mib],
        [target.library_bytes, target.reserve_bytes(room), target.holes_bytes(room)],
        [repr(target.room(room)), address_space_is_limited()],
    ]
    return digest_of(parts)


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
