"""Searches for a plan of one graph, with its weights where a step is fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import Graphs
from offcompile.graph.weight_placement import Choice, Terms, choose, searched_on
from offcompile.ir import BACKWARD, DEVICE, HOST, UPDATE, Infeasible, Machine, Plan, Problem, Tensor
from offcompile.ir.units import show_bytes
from offcompile.machine.hardware import DISK
from offcompile.machine.in_place import InPlace
from offcompile.passes.select.pinned_weights import without_room_on_host
from offcompile.planning import empty_turn
from offcompile.planning.fit_budget import (
    NO_LOSS,
    NOTHING_KNOWN,
    Decided,
    Holes,
    KnownPlans,
    PlanSearch,
    fit_budget,
    fits_as_it_is,
    planning_seconds,
)
from offcompile.planning.floors import floor_of, with_figure, with_reserve
from offcompile.planning.planned_layout import placed_bytes, planned_returns
from offcompile.planning.planner import PlanResult
from offcompile.run.problem_source import ProblemSource
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.fragmentation import HeapLimit
from offcompile.runtime.memory.malloc.heap import address_space_is_limited

from .contract import EMPTIED, PlanRequest

Tell = Callable[[str], None]
#: the part of a budget that memory of no plan is taken to fill, when room for holes is judged
OTHERS_SHARE = 16
#: other graphs that hold no more than this part of a budget are small
LITTLE_SHARE = 64


def tell_nobody(text: str) -> None:
    """Report no progress."""


@dataclass(frozen=True, eq=False)
class GraphPlanner:
    """Plans problems that `source` makes of one graph."""

    source: ProblemSource
    request: PlanRequest
    tell: Tell = tell_nobody
    #: graphs that this source has annotated already
    priced: tuple[Graphs, Annotated] | None = None

    def annotated(self, graphs: Graphs) -> Annotated:
        """Annotate the step with all tensors on the device."""
        if self.priced is not None and self.priced[0] is graphs:
            return self.priced[1]
        return self.source.annotate(graphs, self.budget(), self.tell)

    def budget(self) -> int | None:
        """Bytes that the options leave this graph; None: as few as possible, found by planning."""
        return self.request.budget(self.source.options, self.source.target)

    def fits(self, problem: Problem) -> bool:
        """True if the step is within the budget with nothing moved."""
        budget, source = self.budget(), self.source
        if budget is None:
            return False
        problem = empty_turn.with_outside(problem, self.request.kind.outside_bytes)
        return fits_as_it_is(problem, source.machine, budget - source.target.library_bytes)

    def decide(
        self,
        problem: Problem,
        budget: int | None,
        may_fit: bool = False,
        share: float = 1.0,
        offload_gradients: bool = False,
        known: KnownPlans = NOTHING_KNOWN,
        worth_us: float = float("inf"),
        trial: bool = False,
    ) -> Decided:
        """Search for a plan within the budget. Raises `Infeasible`, and `Beaten` if no plan can
        take less than `worth_us`.

        share: of the usual time. known: plans whose choices are tried. may_fit: see `fit_budget`.
        trial: see `PlanSearch`.
        """
        options, target = self.source.options, self.source.target
        seconds = share * self.seconds(problem)
        search = PlanSearch(
            partial(self.machine, problem),
            target.reserve_bytes,
            options.whole_policy,
            seconds,
            self.tell,
            trial,
            options.reuse_plans,
            self.request.beside,
            target.library_bytes,
            known,
        )
        kind, held_bytes = self.request.kind, self.request.held_bytes
        gradients = offload_gradients and any(op.phase == BACKWARD for op in problem.ops)
        if budget is not None and (kind.offload_saved or gradients):
            return empty_turn.decide_emptied(problem, search, budget, kind.offload_saved, gradients)

        def fitted(whole: Problem) -> Decided:
            holes = None if budget is None else self._holes(whole, budget)
            return fit_budget(whole, search, budget, held_bytes, holes, may_fit, worth_us)

        made = empty_turn.decide_beside(kind.outside_bytes, problem, fitted)
        if budget is None or kind.keeps_bytes is None:
            return made
        return empty_turn.keeping_at_most(kind.keeps_bytes, problem, search, budget, made)

    def seconds(self, problem: Problem) -> float:
        """The usual time of a search."""
        return self.source.options.seconds or planning_seconds(problem)

    def host_bytes(self) -> int | None:
        """Bytes of the host tier that other calls leave to this graph; None: no limit."""
        capacity = self.source.machine(1).tier[HOST].capacity_bytes
        return None if capacity is None else max(0, capacity - self.request.host_held_bytes)

    def machine(self, problem: Problem, device_bytes: int) -> Machine:
        """The target's machine, with the room on its host tier that others and results leave.

        Others hold results in memory, which is the host's wherever a plan sends them. A limit that
        the whole step keeps is none: bounds are better and faster without.
        """
        machine, room = self.source.machine(device_bytes), self.host_bytes()
        if room is None:
            return machine
        if sum(t.nbytes for t in problem.tensors) <= room:
            return machine.with_capacity(HOST, None)
        return machine.with_capacity(HOST, max(0, room - self.results_bytes(problem)))

    def results_bytes(self, problem: Problem) -> int:
        """Bytes of results that may leave, if a plan may send them to a disk that cannot be
        memory."""
        return sum(t.nbytes for t in self._results(problem))

    def results_on_host(self, problem: Problem, plan: Plan) -> int:
        """Bytes of the host that results take which the plan sends to disk."""
        sent = {move.tensor for move in plan.moves if move.target == DISK}
        return sum(t.nbytes for t in self._results(problem) if t.id in sent)

    def _results(self, problem: Problem) -> list[Tensor]:
        if self.source.kind == "cpu" or DISK not in self.source.machine(1).tier:
            return []
        results = (t for t in problem.tensors if t.home is None and not t.pinned)
        return [t for t in results if problem.must_survive(t.id)]

    def places_blocks(self, budget: int) -> bool:
        """True if blocks of this graph's steps are expected to get places: steps are alike, and
        no other graphs run among them but small ones."""
        alone = self.request.held_bytes <= budget // LITTLE_SHARE
        return tensor_memory.will_fit() and not self.request.sizes and alone

    def _holes(self, problem: Problem, budget: int) -> Holes:
        source = self.source
        room, wanted_bytes = source.target.room(budget), source.target.holes_bytes(budget)
        us_per_mib = source.touch_again_us_per_mib
        # if the address space is limited, holes cost no time: a step that finds no place fails
        if room is None or not us_per_mib or problem.steady or address_space_is_limited():
            return Holes(wanted_bytes)

        placed = self.places_blocks(budget)

        def fits_in_places(machine: Machine, made: PlanResult) -> bool:
            taken = placed_bytes(problem, machine, made.plan, made.timeline)
            return tighter.nbytes is None or taken <= tighter.nbytes

        def touched_us(machine: Machine, made: PlanResult, heap: HeapLimit) -> float:
            if placed and fits_in_places(machine, made):
                return 0.0
            found = planned_returns(problem, machine, made.plan, made.timeline, heap)
            return found.touched_mib * us_per_mib

        def enough(machine: Machine, made: PlanResult) -> bool:
            if placed:
                return fits_in_places(machine, made)
            compute_us = sum(op.duration_us for op in problem.ops)
            return touched_us(machine, made, tighter) <= NO_LOSS * compute_us

        counted = not source.profile.includes_touching
        # Inductor's kernels take and free buffers in an order of their own, and to plan again takes
        # another compilation
        known, needed = source.options.lowering == "aot_eager", source.profile.lacks_room
        tighter = room.smaller(budget // OTHERS_SHARE)
        return Holes(
            wanted_bytes,
            partial(touched_us, heap=room) if counted else None,
            enough if known and not needed else None,
            needed,
        )


#: kinds of the user's tensors that may leave for the host besides activations
LEAVING = ("weight", "gradient")


@dataclass(eq=False)
class PlacementSearch:
    """Plans annotated graphs. `share`: of the usual time to search."""

    planner: GraphPlanner
    graphs: Graphs
    annotated: Annotated
    share: float = 1.0
    #: plans of the step with its weights placed differently, whose choices are tried
    _known: list[tuple[Problem, Decided]] = field(default_factory=list)

    @cached_property
    def in_place(self) -> InPlace | None:
        """The cost of using weights and gradients in place on the host; None if that cannot be."""
        tensors = self.annotated.problem.tensors
        weights = sum(t.nbytes for t in tensors if t.kind == "weight")
        found = self.planner.source.target.in_place(2 * weights)  # gradients too
        if found is None or self.planner.source.options.lowering != "inductor":
            return found
        return replace(found, rows_a_read=None)  # our kernels read each byte once

    @cached_property
    def _without_room(self) -> frozenset[str] | None:
        """Weights that a limited host tier cannot take beside the others: they never move there.
        None if it cannot take the results that may leave with them."""
        planner = self.planner
        room_bytes = planner.host_bytes()
        if room_bytes is None:
            return frozenset()
        found = planner.source.problem(self.graphs, self.in_place).problem
        room_bytes -= planner.results_bytes(found)
        return without_room_on_host(found, room_bytes) if room_bytes >= 0 else None

    def best(self) -> Choice:
        """Find the plan. Raises `Infeasible`."""
        found = self._best()
        if found.stays is None:
            return found
        return replace(found, stays=found.stays | (self._without_room or frozenset()))

    def _best(self) -> Choice:
        request, source, budget = self.planner.request, self.planner.source, self.planner.budget()
        try:
            return self._all_on_host(budget) or self._fastest(budget, budget is None)
        except Infeasible as error:
            if budget is None or request.kind.offload_saved or not request.explains:
                raise
            try:  # the advice in the refusal must be enough
                found = self._fastest(budget, True).decided
            except Infeasible:
                raise error from None
            least = found.machine.tier[DEVICE].capacity_bytes
            assert least is not None
            total = with_reserve(least, source.target.reserve_bytes) + request.held_bytes
            told = with_figure(error, total, budget + request.held_bytes)
            raise self._with_host_room(told) from None

    def _with_host_room(self, error: Infeasible) -> Infeasible:
        """The same refusal; if the host tier had no room for weights, it says so."""
        stay = self._without_room if self.in_place is not None else frozenset()
        room_bytes = self.planner.host_bytes()
        if room_bytes is None or stay == frozenset():
            return error
        weights = [t for t in self.annotated.problem.tensors if t.kind == "weight"]
        lacking = [t.nbytes for t in weights if stay is None or t.id in stay]
        options = self.planner.source.options
        bound = "this machine's memory" if options.host_memory is None else "host_memory"
        text = (
            f"Or give the host more room: {bound} leaves {show_bytes(room_bytes)} to this graph,"
            f" which keeps {show_bytes(sum(lacking))} of weights on the device."
        )
        return Infeasible(error.reason, error.needed_bytes, f"{error.smallest_change} {text}")

    def _all_on_host(self, budget: int | None) -> Choice | None:
        """Put every weight on the host, and leave half of the room to the runtime's keeper if the
        other half is enough for a plan. None if that is not asked for."""
        wanted = self.planner.request.kind.weights_on_host
        found = self.on_host(frozenset()) if wanted else None
        if found is None or budget is None:
            return None
        source = self.planner.source
        floor = with_reserve(floor_of(found.problem, source.machine), source.target.reserve_bytes)
        room = min(budget, max(floor, budget // 2))
        # if weights leave for others, their gradients had better leave as well
        tries = [(room, True), (budget, True), (room, False), (budget, False)]
        for nbytes, offload_gradients in dict.fromkeys(tries):
            try:
                made = self.planner.decide(
                    found.problem, nbytes, share=self.share, offload_gradients=offload_gradients
                )
            except Infeasible:
                if (nbytes, offload_gradients) == tries[-1]:
                    raise
            else:
                return Choice(found, made, frozenset())
        return None

    def _fastest(self, budget: int | None, to_floor: bool) -> Choice:
        """Compare plans with weights on the device and on the host; `to_floor`: by their peak."""
        source = self.planner.source
        return choose(
            self.annotated,
            self.on_host,
            partial(self._decide, None if to_floor else budget),
            to_floor=to_floor,
            floor_of=partial(floor_of, machine_for=source.machine),
            terms=Terms(
                must_leave=source.options.gradient_reserve is not None,
                # the other policies come from papers, which do not split
                may_split=source.options.policy.partition(":")[0] == "joint" and self.share == 1.0,
                gain=source.target.worth_leaving,
            ),
            rival=self.planner.request.rival,
        )

    def on_host(self, stays: frozenset[str]) -> Annotated | None:
        """Annotate the step with all weights on the host but these and those that have no room
        there; None if that cannot be."""
        if self.in_place is None or self.planner.request.kind == EMPTIED:
            return None
        source = self.planner.source
        if self._without_room is None:
            return None
        source.measure_in_place(self.graphs, self.in_place)
        found = source.problem(self.graphs, self.in_place, stays | self._without_room)
        leaves = any(not t.pinned for t in found.problem.tensors if t.kind in LEAVING)
        return found if leaves else None

    def searched_on(self, trial: Choice) -> Choice:
        """Search on from a plan that a trial found for these graphs."""
        self._remember(trial.annotated.problem, trial.decided)
        return searched_on(trial, partial(self._decide, self.planner.budget()))

    def _decide(
        self,
        budget: int | None,
        found: Annotated,
        *,
        may_fit: bool,
        share: float = 1.0,
        worth_us: float = float("inf"),
        trial: bool = False,
    ) -> Decided:
        settled, updates_us = self.planner.request.settled, self._updates_us(found)
        if settled is not None and settled.fits(found.problem, budget):
            return replace(settled.decided, updates_us=updates_us)
        made = self.planner.decide(
            found.problem,
            budget,
            may_fit,
            self.share * share,
            known=self._known_of(found.problem),
            worth_us=worth_us - updates_us,
            trial=trial,
        )
        self._remember(found.problem, made)
        return replace(made, updates_us=updates_us)

    def _remember(self, problem: Problem, made: Decided) -> None:
        if made.result.plan.recomputes or made.result.plan.updates:
            self._known.append((problem, made))

    def _known_of(self, problem: Problem) -> KnownPlans:
        """All known plans, with one of this very problem as the newest."""
        rival = self.planner.request.rival.plan
        others = [made.result.plan for other, made in self._known if other is not problem]
        mine = [made for other, made in self._known if other is problem]
        plans = [*([] if rival is None else [rival]), *others, *(m.result.plan for m in mine)]
        return KnownPlans(tuple(plans), mine[-1] if mine else None)

    def _updates_us(self, found: Annotated) -> float:
        """The time that a user's optimizer takes over the link for weights that are on the host.

        0 if the problem has the updates, if they are made by the processor (`offcompile.optim`, the
        CPU target), or if nothing trains.
        """
        tensors, names = found.problem.tensors, found.names
        planned = any(op.phase == UPDATE for op in found.problem.ops)
        if planned or self.in_place is None:
            return 0.0
        request = self.planner.request
        share = request.updated_there if request.taken.updated else 1.0
        if self.planner.source.target.device.type == "cpu":
            return 0.0
        trained = {names.get(t.id) for t in tensors if t.kind == "gradient"}
        hosted = [t for t in tensors if t.kind == "weight" and t.home == HOST]
        nbytes = sum(t.nbytes for t in hosted if names.get(t.id) in trained)
        return share * self.in_place.update_us(nbytes)
