"""Plans a graph once for all ranks: one searches, and the others carry out its plan.

A rank that takes the answer of another (`answers`) rewrites its own graphs, and searches and
measures nothing. It checks the plan on its own machine: all moves must be lawful there, and the
program must keep to its budget with the needs of its own ops, at any speed of its lanes.
"""

from __future__ import annotations

from dataclasses import replace

from offcompile.graph.graphs import Graphs
from offcompile.graph.mask_bits import compact
from offcompile.graph.sizes import hint_of
from offcompile.graph.split import Splits
from offcompile.graph.weight_placement import Choice
from offcompile.ir import DEVICE, Infeasible, OffloadError, Problem
from offcompile.ir.units import show_bytes
from offcompile.ir.verify import check_structure
from offcompile.ir.version import VERSION
from offcompile.planning.fit_budget import Decided
from offcompile.planning.planner import PlanResult
from offcompile.planning.replay import worst_case
from offcompile.planning.splitting import Splitting
from offcompile.report.log import warn
from offcompile.run.problem_source import ProblemSource
from offcompile.run.ranks.figures import RankFigures, structure_of
from offcompile.run.ranks.meeting import Meeting
from offcompile.simulate import Simulator

from .answers import (
    FORMAT,
    TheirPlan,
    TheirRefusal,
    Unreadable,
    answer_of,
    read_answer,
    refusal_of,
)
from .candidates import Candidate
from .contract import PlanRequest
from .pieces import best_candidate, cut, ways_of
from .planner import GraphPlanner, PlacementSearch


def plan_together(
    meeting: Meeting, planner: GraphPlanner, given: Graphs, splits: Splits | None
) -> Candidate:
    """Return the plan of all ranks, or this rank's own if they do not plan together. Raises
    `Infeasible`."""
    budget = planner.budget()
    plain = planner.source.annotate(given, budget, planner.tell).problem
    settings = _settings(planner.source, planner.request)
    mine = RankFigures.of(plain, planner.source.machine(1), budget, settings)
    if meeting.leads(mine):
        return _led(meeting, mine, planner, given, splits)
    return _followed(meeting, mine, planner, given, splits)


def _settings(source: ProblemSource, request: PlanRequest) -> tuple[object, ...]:
    """List the settings that a plan depends on, beginning with the version and the format of
    answers."""
    options = source.options
    asked = options.lowering, options.whole_policy, options.split
    return (
        VERSION,
        FORMAT,
        *asked,
        tuple(request.kind),
        sorted(request.taken.updated),
        sorted(request.fixed),
    )


# --- the rank that plans ------------------------------------------------------------------------


def _led(
    meeting: Meeting,
    mine: RankFigures,
    planner: GraphPlanner,
    given: Graphs,
    splits: Splits | None,
) -> Candidate:
    known = meeting.least(mine)
    if known is None:
        meeting.answer(None)
        return best_candidate(planner, given, splits)
    asking = replace(
        planner,
        source=replace(planner.source, slowest=known.slowest),
        request=replace(planner.request, lacking_bytes=known.lacking_bytes),
    )
    try:
        found = best_candidate(asking, given, splits)
    except Infeasible as error:
        meeting.answer(refusal_of(error, asking.budget()))
        if not known.lacking_bytes:
            raise
        return best_candidate(planner, given, splits)
    meeting.answer(answer_of(found))
    # steps are measured on this rank
    return replace(found, source=replace(found.source, slowest=None))


# --- the ranks that take the plan ---------------------------------------------------------------


class NotHere(Exception):
    """The plan of another rank cannot be carried out on this one."""


def _followed(
    meeting: Meeting,
    mine: RankFigures,
    planner: GraphPlanner,
    given: Graphs,
    splits: Splits | None,
) -> Candidate:
    planner.tell("waiting for the plan of another rank")
    said = meeting.answered(mine)
    if said is None:
        return best_candidate(planner, given, splits)
    try:
        answer = read_answer(said)
        if isinstance(answer, TheirPlan):
            return taken(answer, planner, given, splits)
    except (NotHere, Unreadable, OffloadError) as error:
        warn(
            f"{planner.request.name}: rank {meeting.group.rank} cannot carry out the plan of"
            f" another rank, and plans for itself: {error}. This is harmless"
        )
    else:
        if _also_here(answer, mine):
            raise answer.error
    return best_candidate(planner, given, splits)


def _also_here(refusal: TheirRefusal, mine: RankFigures) -> bool:
    """True if there is no plan on this rank either: it has no larger budget."""
    budget, theirs = mine.budget_bytes, refusal.budget_bytes
    return budget == theirs or (budget is not None and theirs is not None and budget < theirs)


def taken(
    answer: TheirPlan,
    planner: GraphPlanner,
    given: Graphs,
    splits: Splits | None,
    splitting: Splitting | None = None,
    anew: bool = False,
) -> Candidate:
    """Rewrite the graphs for the plan of another rank, or of an earlier process. Raises `NotHere`
    if it is not for them, or not for this machine. splitting: of its pieces, if that is known.
    anew: time the plan with the costs and rates of this process, not with those of the answer."""
    pieces, stays, rewrites = answer.pieces, answer.stays, answer.rewrites
    if pieces is not None and splits is None:
        raise NotHere("it splits a loss that is not found here")
    graphs = given if splits is None else cut(given, splits, pieces)
    source = planner.source
    if rewrites.apart:
        graphs = source.apart(graphs)
    if rewrites.bits:
        hint, fuses = hint_of(source.sizes), source.options.lowering == "inductor"
        compacted = compact(graphs, hint, fuses=fuses)
        if compacted is None:
            raise NotHere("it packs masks that are not found here")
        graphs = compacted.graphs
    if anew:
        source = replace(source)
        if graphs is not given:
            source.price(graphs, planner.budget(), planner.tell)
    elif graphs is not given:  # the costs of the answer count
        source = source.estimated(graphs, planner.tell)
    plain, offers = source.problem(graphs), None
    if rewrites.withheld is not None:
        updated = planner.request.taken.updated
        offers = source.with_offers(graphs, plain, updated, rewrites.withheld)
        if offers is None:
            raise NotHere("it updates weights in backward that are not found here")
        graphs, plain = offers.graphs, source.problem(offers.graphs)
    search = PlacementSearch(replace(planner, source=source), graphs, plain)
    annotated = plain if stays is None else search.on_host(stays)
    if annotated is None:
        raise NotHere("it sends weights to the host that have to stay here")
    problem = answer.problem
    if structure_of(problem) != structure_of(annotated.problem):
        raise NotHere("its graph has other tensors or ops")
    if anew:
        problem, room = annotated.problem, answer.machine.tier[DEVICE].capacity_bytes
        machine = planner.machine(problem, room or 1)
        answer = replace(answer, problem=problem, machine=machine)
    decided = _decided(answer)
    packed = (replace(t, ratios=problem.tensor[t.id].ratios) for t in annotated.problem.tensors)
    _judge(decided, replace(annotated.problem, tensors=tuple(packed)), planner)
    if pieces is not None and splits is not None and splitting is None:
        splitting = ways_of(planner, given, splits).splitting(pieces)
    return Candidate(
        source,
        graphs,
        Choice(
            replace(annotated, problem=problem),
            decided,
            stays,
            splitting,
        ),
        None if stays is None else search.in_place,
        offers,
        pieces,
        rewrites,
    )


def _decided(answer: TheirPlan) -> Decided:
    """Simulate the plan, with the figures of the answer."""
    problem, machine, plan = answer.problem, answer.machine, answer.plan
    if broken := check_structure(problem, machine, plan):
        raise NotHere(f"it is not lawful: {broken[0]}")
    timeline = Simulator(problem, machine).run(plan)
    if timeline.violations:
        raise NotHere(f"it does not run: {timeline.violations[0]}")
    result = PlanResult(plan, timeline, *answer.search)
    return Decided(
        result,
        machine,
        answer.order,
        answer.fits,
        answer.holes_bytes,
        answer.kept,
        answer.touching_us,
        answer.updates_us,
        spares_room=answer.spares_room,
    )


def _judge(decided: Decided, own: Problem, planner: GraphPlanner) -> None:
    """Raise `NotHere` if this rank cannot carry out a plan. `own`: the problem as it is here."""
    source, budget, plan = planner.source, planner.budget(), decided.result.plan
    capacity = decided.machine.tier[DEVICE].capacity_bytes or 1
    if broken := check_structure(own, source.machine(capacity), plan):
        raise NotHere(f"it is not lawful here: {broken[0]}")
    if budget is None:
        return
    needed = worst_case(own, plan, decided.order.steps)
    room = budget - source.target.kept_back_bytes(budget, not decided.fits)
    if needed > room:
        raise NotHere(f"it needs {show_bytes(needed)} of {show_bytes(room)} here")
