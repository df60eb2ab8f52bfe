"""Tries the ways to plan one graph, in order: the first that applies gives its plan.

Each way takes a planner and the annotated graph. It returns None if it does not apply, and raises
`Infeasible` if it does and there is no plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import Graphs, Hint
from offcompile.graph.in_backward_updates import Offers, read_after_update
from offcompile.graph.mask_bits import has_bits
from offcompile.graph.weight_placement import TRIAL_SHARE, Choice
from offcompile.ir import Infeasible, Problem
from offcompile.ir.units import show_bytes
from offcompile.machine.in_place import InPlace
from offcompile.passes.turnover import more_held, reruns_at
from offcompile.planning.fit_budget import NO_LOSS, PlanSearch, fit_budget
from offcompile.planning.floors import peak_alone, with_reserve
from offcompile.planning.planner import Beaten
from offcompile.run.problem_source import ProblemSource

from .contract import EMPTIED
from .planner import GraphPlanner, PlacementSearch

#: share of a step that packing and unpacking masks may take if everything fits with them packed
BITS_COST = 0.02
#: little to search for: everything that can leave does
TURNING_SECONDS = 0.2


@dataclass(frozen=True)
class Rewrites:
    """Says how the planned graphs came from those given, apart from pieces."""

    #: ops that may be recomputed in part are split in two
    apart: bool = False
    #: masks are saved as bits
    bits: bool = False
    #: weights whose gradients are not offered to the optimizer; None: no gradient is
    withheld: frozenset[str] | None = None


@dataclass(frozen=True, eq=False)
class Candidate:
    """Graphs and a plan for them."""

    source: ProblemSource
    graphs: Graphs
    choice: Choice
    #: the cost of operands in place; None if no weight moves to the host
    in_place: InPlace | None = None
    #: gradients that the graphs offer to an optimizer while they run
    offers: Offers | None = None
    #: number of pieces of the loss; None: whole
    pieces: int | None = None
    rewrites: Rewrites = Rewrites()

    def problem_at(self, hint: Hint) -> Problem:
        """Build the planned step at other sizes."""
        stays = self.choice.stays or frozenset()
        return self.source.problem(self.graphs, self.in_place, stays, hint).problem


@dataclass(frozen=True, eq=False)
class Traced:
    """Graphs to plan, annotated with all tensors on the device."""

    graphs: Graphs
    plain: Annotated
    #: True if nothing has to move
    fits: bool
    rewrites: Rewrites = Rewrites()

    @property
    def compute_us(self) -> float:
        return sum(op.duration_us for op in self.plain.problem.ops)


def plan_in_order(planner: GraphPlanner, graphs: Graphs) -> Candidate:
    """Return the plan of the first candidate in `LADDER` that applies. Raises `Infeasible`, and
    `Beaten` if no plan can beat the request's rival."""
    traced = _traced(planner, graphs)
    return next(made for way in LADDER if (made := way(planner, traced)) is not None)


def _traced(planner: GraphPlanner, graphs: Graphs) -> Traced:
    source, plain = planner.source, planner.annotated(graphs)
    if not planner.request.kind.is_usual:
        return Traced(graphs, plain, False)
    fits, rewrites = planner.fits(plain.problem), Rewrites()
    if not fits and (apart := source.apart(graphs)) is not graphs:
        graphs, plain = apart, planner.annotated(apart)
        rewrites = Rewrites(apart=True)
    return Traced(graphs, plain, fits, rewrites)


def searched_on(planner: GraphPlanner, made: Candidate) -> Candidate:
    """Search on from a plan of a trial; return any other unchanged."""
    if not made.choice.is_trial:
        return made
    own = replace(_unexplained(planner), source=made.source)
    search = PlacementSearch(own, made.graphs, made.choice.annotated)
    choice = search.searched_on(made.choice)
    late = made.offers is not None and read_after_update(
        made.offers, choice.annotated, choice.decided.order
    )
    return made if late else replace(made, choice=choice)


# --- the candidates -----------------------------------------------------------------------------


def emptied_within_own_peak(planner: GraphPlanner, traced: Traced) -> Candidate | None:
    """Move everything that backward gets from forward, within the memory that the step needs alone.
    Applies if that is asked for, and the budget is enough."""
    source, budget, problem = planner.source, planner.budget(), traced.plain.problem
    price = planner.request.kind.ns_per_byte
    if planner.request.kind._replace(ns_per_byte=0.0) != EMPTIED:
        return None
    reserve, policy = source.target.reserve_bytes, "turnover"
    needed = peak_alone(problem, source.machine)
    if price:
        policy += f":ns_per_byte={price!r}"
        needed += more_held(problem, reruns_at(problem, price))
    enough = with_reserve(needed, reserve)
    if budget is not None and enough > budget:
        if price:
            raise Infeasible(
                f"{planner.request.name}: to run ops again in backward takes"
                f" {show_bytes(enough)}, and {show_bytes(budget)} are left.",
                enough - budget,
                "Let its tensors move instead.",
            )
        return None
    search = PlanSearch(source.machine, reserve, policy, TURNING_SECONDS, planner.tell)
    decided = fit_budget(problem, search, enough, may_fit=False)
    return Candidate(source, traced.graphs, Choice(traced.plain, decided))


def emptied_or_on_host(planner: GraphPlanner, traced: Traced) -> Candidate | None:
    """Move everything that backward gets from forward, put all weights on the host, or both, within
    the budget. Applies if that is asked for."""
    return None if planner.request.kind.is_usual else _placed(planner, traced)


def as_it_is(planner: GraphPlanner, traced: Traced) -> Candidate | None:
    """Leave the graph unchanged. Applies if nothing has to move."""
    return _placed(planner, traced) if traced.fits else None


def masks_as_bits(planner: GraphPlanner, traced: Traced) -> Candidate | None:
    """Save masks as bits. Applies if that makes a better plan; otherwise it may return the plan
    without. None if no masks matter."""
    source, settled = planner.source, planner.request.settled
    if settled is not None and not has_bits(settled.problem):
        return None
    made = source.packed(traced.graphs)
    if made is None or not made.matters:
        return None
    packing = replace(planner, source=replace(source))
    plain = packing.source.annotate(made.graphs, planner.budget(), planner.tell)
    rewrites = replace(traced.rewrites, bits=True)
    smaller = Traced(made.graphs, plain, planner.fits(plain.problem), rewrites)
    cheap = smaller.compute_us <= traced.compute_us * (1 + BITS_COST)
    if settled is None and not (cheap and (smaller.fits or planner.request.quick)):
        try:
            found = moved(_unexplained(planner), traced)
        except (Infeasible, Beaten):
            planner.tell("planning with masks as bits")
        else:
            least_us = max(traced.compute_us, found.choice.decided.result.lower_bound_us)
            moving = found.choice.decided.cost_us > least_us * (1 + BITS_COST)
            worth = moving or planner.budget() is None
            if not (worth and _better(packing, smaller, found.choice)):
                return found
    return moved(packing, smaller)


def moved(planner: GraphPlanner, traced: Traced, share: float = 1.0) -> Candidate:
    """Move tensors until the step fits, and offer gradients to the optimizer that updates during
    backward, if there is one. Always applies. `share`: of the usual time to search."""
    source, updated = planner.source, planner.request.taken.updated
    without: frozenset[str] = frozenset()
    while updated and not traced.fits:
        offers = source.with_offers(traced.graphs, traced.plain, updated, without)
        if offers is None:
            break
        rewrites = replace(traced.rewrites, withheld=without)
        offering = Traced(offers.graphs, source.problem(offers.graphs), False, rewrites)
        found = _placed(planner, offering, share)
        late = read_after_update(offers, found.choice.annotated, found.choice.decided.order)
        if not late:
            return replace(found, offers=offers)
        without |= late
    return _placed(planner, traced, share)


#: the order in which candidates are tried; the first two are for requests that are not `USUAL`
LADDER: tuple[Callable[[GraphPlanner, Traced], Candidate | None], ...] = (
    emptied_within_own_peak,
    emptied_or_on_host,
    as_it_is,
    masks_as_bits,
    moved,
)


# --- parts of them ------------------------------------------------------------------------------


def _placed(planner: GraphPlanner, traced: Traced, share: float = 1.0) -> Candidate:
    """Plan these graphs with their weights where the step is fastest."""
    search = PlacementSearch(planner, traced.graphs, traced.plain, share)
    choice = search.best()
    in_place = None if choice.stays is None else search.in_place
    return Candidate(planner.source, traced.graphs, choice, in_place, rewrites=traced.rewrites)


def _unexplained(planner: GraphPlanner) -> GraphPlanner:
    return replace(planner, request=replace(planner.request, explains=False))


def _better(packing: GraphPlanner, smaller: Traced, than: Choice) -> bool:
    """True if a shorter search finds a plan for these graphs that beats `than`."""
    trial = replace(_unexplained(packing), source=replace(packing.source))
    try:
        found = moved(trial, smaller, TRIAL_SHARE)
    except (Infeasible, Beaten):
        return False
    mine, other = found.choice.decided, than.decided
    faster = mine.cost_us < other.cost_us * (1 - NO_LOSS)
    if packing.budget() is not None:
        return faster
    peak, peak_before = mine.order.peak_bytes, other.order.peak_bytes
    return peak < peak_before or (peak == peak_before and faster)
