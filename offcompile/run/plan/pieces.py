"""Plans a graph whole or in pieces, whichever is better."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from offcompile.graph.graphs import Graphs
from offcompile.graph.split import Splits
from offcompile.graph.split.decision import Ways
from offcompile.planning.floors import floor_of, with_reserve
from offcompile.planning.planner import NO_RIVAL, Rival
from offcompile.planning.splitting import StepEstimate

from .candidates import Candidate, plan_in_order, searched_on
from .planner import GraphPlanner, PlacementSearch


def best_candidate(planner: GraphPlanner, given: Graphs, splits: Splits | None = None) -> Candidate:
    """Plan the graphs, whole or in pieces. Raises `Infeasible`."""
    if splits is None or given.backward is None:
        return plan_in_order(planner, given)
    ways, settled = ways_of(planner, given, splits), planner.request.settled
    if settled is None:
        found, splitting = ways.best()
    elif settled.pieces is None:
        found, splitting = ways.whole(True, NO_RIVAL), None
    else:
        pieces = settled.pieces
        found, splitting = ways.in_pieces(pieces, True, NO_RIVAL), ways.splitting(pieces)
    return replace(found, choice=replace(found.choice, splitting=splitting))


def ways_of(planner: GraphPlanner, given: Graphs, splits: Splits) -> Ways[Candidate]:
    """List the ways to plan graphs that may be split."""
    request = planner.request

    def whole(explains: bool, rival: Rival) -> Candidate:
        asked = replace(request, explains=request.explains and explains, rival=rival)
        return plan_in_order(replace(planner, request=asked), given)

    def in_pieces(pieces: int, explains: bool, rival: Rival) -> Candidate:
        planner.tell(f"planning in {pieces} pieces")
        asked = replace(request, explains=request.explains and explains, rival=rival)
        own = GraphPlanner(replace(planner.source), asked, planner.tell)
        return replace(plan_in_order(own, cut(given, splits, pieces)), pieces=pieces)

    return Ways(
        planner.source.options,
        planner.budget(),
        whole,
        in_pieces,
        cache(lambda pieces: estimate_step(planner, cut(given, splits, pieces))),
        splits.parts,
        lambda: splits.most_pieces,
        lambda: splits.largest_bytes,
        lambda made: made.choice,
        partial(searched_on, planner),
        request.explains,
    )


def cut(given: Graphs, splits: Splits, pieces: int | None) -> Graphs:
    """Cut the graphs into so many pieces; None: leave them whole."""
    if pieces is None:
        return given
    forward, backward = splits.into(pieces)
    return replace(given, forward=forward, backward=backward)


def estimate_step(planner: GraphPlanner, graphs: Graphs) -> StepEstimate:
    """Annotate the step without measuring its ops, and find its floor without searching."""
    source = planner.source.estimating()
    search = PlacementSearch(
        replace(planner, source=source), graphs, source.annotate(graphs, None, planner.tell)
    )
    steps = [search.annotated.problem]
    on_host = search.on_host(frozenset())
    if on_host is not None:
        steps.append(on_host.problem)
    floor = min(floor_of(step, source.machine) for step in steps)
    return StepEstimate(steps[0], with_reserve(floor, source.target.reserve_bytes))
