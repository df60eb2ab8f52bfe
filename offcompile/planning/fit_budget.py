"""Decides whether a step fits a budget without moves, and otherwise which plan makes it fit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from offcompile.ir import DEVICE, Infeasible, Machine, Plan, Problem
from offcompile.ir.units import show_bytes
from offcompile.runtime.base.interpreter import rarely_collected
from offcompile.simulate import Simulator

from .floors import floor_of, plain_plan, refusal_within, total_bytes
from .order import Order, static_order
from .plan_cache import Question, plan_once
from .planner import OUTLINE_FROM_OPS, Beaten, PlanResult
from .ranks.judge import CollectivesBeside

#: planning time: a base, plus a part per op and per tensor, up to a maximum
BASE_SECONDS, SECONDS_PER_ENTRY, MOST_SECONDS = 0.3, 0.001, 4.2
#: limits planning to the time of this many steps, as a search could not gain more than that
MOST_STEPS, LEAST_SECONDS = 100, 0.2
US_PER_S = 1e6
#: number of times the floor is raised if no schedule is found exactly at it
MOST_RAISES = 8
#: value of room for holes as a share of a step (measured: docs/backend.md), beside the known
#: cost of touching memory again; a plan that loses at most `NO_LOSS` is taken without comparison
HOLES_COST, NO_LOSS = 0.02, 0.005
#: share of the wanted room for holes that is tried first, and left if tensors do with it
ENOUGH = 1 / 2
#: shares of the wanted room for holes to try, until a plan is found
ROOMS = (1, 3 / 4, 1 / 2, 1 / 4)
#: steps with more ops are searched only once, with room for holes: a search takes long, and gains
#: little from that room
MANY_OPS = 1000
#: room for holes slows a step if that leaves its tensors less than this multiple of the floor: then
#: searches of SHORT_SHARE of the time decide if it is left, and one of LONG_SHARE improves the
#: plan. If the step has outlines, the search without room comes first: its plan tells early if the
#: other loses
NEAR_FLOOR, SHORT_SHARE, LONG_SHARE = 4 / 3, 1 / 5, 3 / 5
#: recomputing small tensors does not save a floor that exceeds the capacity by this factor
HOPELESS = 1.25


@dataclass(frozen=True)
class Decided:
    """The chosen plan, its machine, and the order in which it will run."""

    result: PlanResult
    machine: Machine
    order: Order
    #: True if nothing needs to move, so that the graphs stay as they are
    fits: bool
    #: bytes of the budget, beside the runtime's reserve, left to holes between tensors
    holes_bytes: int = 0
    #: tensors that forward leaves on the device for backward, if that was planned (`turn`)
    kept: frozenset[str] | None = None
    #: time to touch memory again that was returned to the system meanwhile; 0 if not known
    touching_us: float = 0.0
    #: time that the user's optimizer takes after the graphs for weights that are on the host
    updates_us: float = 0.0
    #: True if a trial found the plan: a search may go on from it
    trial: bool = False
    #: True if holes want more room than that, and tensors are expected to do with it
    spares_room: bool = False

    @property
    def cost_us(self) -> float:
        """The expected time of a step, by which plans are compared."""
        return self.result.cost_us + self.touching_us + self.updates_us

    @property
    def bound_us(self) -> float:
        """A step with weights and gradients in these places costs no less."""
        return self.result.lower_bound_us + self.updates_us


@dataclass(frozen=True)
class Holes:
    """The effect of holes between tensors on a heap: the room that they need within a budget, and
    the time a plan loses by touching memory again that was returned for lack of that room.

    touching_us: None if that is not known, or if the ops' costs include it. enough: True if a plan
    leaves enough room, though less than is wanted; None if that is not known. needed: True if steps
    have shown that no less will do.
    """

    wanted_bytes: int
    touching_us: Callable[[Machine, PlanResult], float] | None = None
    enough: Callable[[Machine, PlanResult], bool] | None = None
    needed: bool = False


@dataclass(frozen=True)
class KnownPlans:
    """Plans of the same ops, the newest last. begun: the plan that a trial found for this very
    step and budget, if it is the newest; the caller keeps it if no better one is found."""

    plans: tuple[Plan, ...] = ()
    begun: Decided | None = None

    @property
    def begun_us(self) -> float:
        return float("inf") if self.begun is None else self.begun.result.cost_us


NOTHING_KNOWN = KnownPlans()


def planning_seconds(problem: Problem) -> float:
    """The time to search unless the user sets one."""
    steps_s = MOST_STEPS * sum(op.duration_us for op in problem.ops) / US_PER_S
    entries = len(problem.ops) + len(problem.tensors)
    wanted = min(MOST_SECONDS, BASE_SECONDS + SECONDS_PER_ENTRY * entries)
    return max(LEAST_SECONDS, min(wanted, steps_s))


@dataclass(frozen=True)
class PlanSearch:
    """Describes a search: the machine and the policy to plan for, and how long to look.

    machine_for: the machine with so many bytes of device memory. reserve_for: bytes of a budget
    that the runtime itself takes once anything moves, not counting holes. library_bytes: those that
    are taken where nothing moves, too. seconds: None: the usual time for the problem.
    """

    machine_for: Callable[[int], Machine]
    reserve_for: Callable[[int], int]
    policy: str
    seconds: float | None = None
    progress: Callable[[str], None] | None = None
    #: True if plans are only compared: the one that is chosen is searched for again
    trial: bool = False
    #: True if plans are kept in the user's cache folder, and found there
    reuses: bool = False
    #: collectives that run beside the plan; None: there are none to know of
    beside: CollectivesBeside | None = None
    library_bytes: int = 0
    known: KnownPlans = NOTHING_KNOWN


def fit_budget(
    problem: Problem,
    search: PlanSearch,
    budget_bytes: int | None,
    held_bytes: int = 0,
    holes: Holes | None = None,
    may_fit: bool = True,
    worth_us: float = float("inf"),
) -> Decided:
    """Finds a plan within the budget (None: the floor). Raises `Infeasible` with figures, and
    `Beaten` if no plan can take less than `worth_us`.

    `held_bytes` of the user's budget belong to other graphs and are not in `budget_bytes`.
    Without `may_fit`, something has to move anyway (weights live on the host).
    """
    machine_for, reserve_for = search.machine_for, search.reserve_for
    capacity = budget_bytes if budget_bytes is not None else floor_of(problem, machine_for)
    if may_fit:
        room = capacity if budget_bytes is None else capacity - search.library_bytes
        fitting = _as_it_is(problem, machine_for, room, budget_bytes)
        if fitting is not None:
            return fitting
    plans = _Plans(problem, search, holes or Holes(0), worth_us)
    if budget_bytes is None:
        found = plans.near_floor(capacity)
    else:
        capacity = budget_bytes - reserve_for(budget_bytes)
        floor = floor_of(problem, machine_for)
        refusing = (problem, machine_for, reserve_for, search.policy, budget_bytes, held_bytes)
        if floor > capacity * HOPELESS and (refusal := refusal_within(*refusing)):
            raise refusal
        try:
            found = plans.within(capacity, floor)
        except Infeasible as error:
            refusal = refusal_within(*refusing, error.needed_bytes)
            raise refusal or Infeasible(
                f"The budget of {show_bytes(budget_bytes)} is above the floor, but no order of"
                " moves was found within it.",
                None,
                "Set memory to 'minimum', or to a little more.",
            ) from None
    order = static_order(problem, found.machine, found.result.plan, found.result.timeline)
    return Decided(
        found.result,
        found.machine,
        order,
        False,
        found.holes_bytes,
        touching_us=found.touching_us,
        trial=search.trial,
        spares_room=found.spares_room,
    )


def fits_as_it_is(problem: Problem, machine_for: Callable[[int], Machine], room_bytes: int) -> bool:
    """True if the step takes at most so much with nothing moved."""
    return _as_it_is(problem, machine_for, room_bytes, room_bytes) is not None


def _as_it_is(
    problem: Problem,
    machine_for: Callable[[int], Machine],
    capacity: int,
    budget_bytes: int | None,
) -> Decided | None:
    """The decision to move nothing, if the step then fits the capacity; otherwise None."""
    plain = plain_plan(problem)
    timeline = Simulator(problem, machine_for(total_bytes(problem))).run(plain)
    peak = timeline.peak_bytes[DEVICE]
    if peak > capacity:
        return None
    machine = machine_for(max(peak, budget_bytes or peak))
    result = PlanResult(plain, timeline, "none", 0.0, timeline.makespan_us, "compute")
    return Decided(result, machine, static_order(problem, machine, plain, timeline), True)


@dataclass(frozen=True)
class _Planned:
    machine: Machine
    result: PlanResult
    holes_bytes: int = 0
    touching_us: float = 0.0
    spares_room: bool = False

    @property
    def cost_us(self) -> float:
        return self.result.cost_us + self.touching_us


@dataclass(frozen=True)
class _Plans:
    """Searches for plans of one step within several capacities."""

    problem: Problem
    search: PlanSearch
    holes: Holes
    worth_us: float

    def __call__(
        self,
        capacity: int,
        holes_bytes: int = 0,
        worth_us: float = float("inf"),
        share: float = 1.0,
        before: _Planned | None = None,
    ) -> _Planned:
        """A plan that leaves so much room for holes. `share`: of the time. before: a plan whose
        choices are tried; one with the same room is gone on from."""
        search, known = self.search, self.search.known
        spend = search.seconds or planning_seconds(self.problem)
        machine = search.machine_for(max(1, capacity - holes_bytes))
        begun_us, trial = known.begun_us, search.trial and share != LONG_SHARE
        if before is not None and share == LONG_SHARE:
            begun_us = before.result.cost_us
        asked = Question(
            self.problem,
            machine,
            search.policy,
            spend if trial else share * spend,
            known.plans if before is None else (*known.plans, before.result.plan),
            min(worth_us, self.worth_us),
            trial or share == SHORT_SHARE,
            search.beside,
            begun_us,
        )
        with rarely_collected():
            made = plan_once if search.reuses else Question.answered
            result = made(asked, search.progress)
        known_us = self.holes.touching_us
        touching_us = 0.0 if known_us is None else known_us(machine, result)
        return _Planned(machine, result, holes_bytes, touching_us)

    def within(self, capacity: int, floor: int) -> _Planned:
        """The better of plans with room for holes and without. Raises `Infeasible`."""
        ops, search = self.problem.ops, self.search
        rooms = _rooms(capacity, floor, self.holes.wanted_bytes)
        if self.holes.needed and (roomy := self._with_room(capacity, rooms, float("inf"), 1.0)):
            return roomy
        near = bool(rooms) and capacity - rooms[0] < floor * NEAR_FLOOR
        outlined = len(ops) >= OUTLINE_FROM_OPS
        if near and outlined and search.known.begun is not None:  # its trial has compared them
            return self(capacity, search.known.begun.holes_bytes)
        enough = self._with_enough(capacity, floor, rooms[0]) if rooms else None
        near = near and enough is None
        share = SHORT_SHARE if near else 1.0
        tight = self(capacity, share=share) if near and outlined else None
        most_us = float("inf") if tight is None else tight.cost_us * (1 + HOLES_COST)
        roomy = enough or self._with_room(capacity, rooms, most_us, share)
        compute_us = sum(op.duration_us for op in ops)
        free_us = compute_us * (1 + NO_LOSS)
        touches = tight is not None and tight.touching_us > NO_LOSS * compute_us
        if roomy is None and touches:  # trials give up where no outline fits
            roomy = self._with_room(capacity, rooms, most_us, LONG_SHARE)
        if roomy is None:
            found = tight or self(capacity)
        elif not near and (
            roomy.cost_us <= free_us
            or search.trial  # plans that are only compared all leave room
            or len(ops) > MANY_OPS  # takes longer than it can save
        ):
            return roomy
        else:
            # a plan without room for holes must gain more than the holes cost
            least_us = roomy.cost_us / (1 + HOLES_COST)
            if tight is None and roomy.cost_us > free_us:
                with contextlib.suppress(Infeasible, Beaten):
                    tight = self(capacity, worth_us=least_us, share=share, before=roomy)
            found = tight if tight is not None and tight.cost_us < least_us else roomy
        if near and not search.trial and found.cost_us > free_us:
            with contextlib.suppress(Infeasible, Beaten):
                longer = self(capacity, found.holes_bytes, share=LONG_SHARE, before=found)
                found = min(longer, found, key=lambda made: made.cost_us)
        return found

    def _with_enough(self, capacity: int, floor: int, wanted_bytes: int) -> _Planned | None:
        """A plan that leaves less room than is wanted, if that is far from the floor and enough."""
        room = int(wanted_bytes * ENOUGH)
        if self.holes.enough is None or capacity - room < floor * NEAR_FLOOR:
            return None
        with contextlib.suppress(Infeasible):
            found = self(capacity, room)
            if self.holes.enough(found.machine, found.result):
                return replace(found, spares_room=True)
        return None

    def _with_room(
        self, capacity: int, rooms: Sequence[int], most_us: float, share: float
    ) -> _Planned | None:
        """A plan that leaves the first of these rooms with which there is one."""
        for room in rooms:
            with contextlib.suppress(Infeasible):
                try:
                    return self(capacity, room, most_us, share)
                except Beaten:
                    if most_us == float("inf"):
                        raise
                    return None
        return None

    def near_floor(self, capacity: int) -> _Planned:
        """The plan with the least capacity at which a schedule is found."""
        for attempt in range(MOST_RAISES):
            try:
                return self(capacity)
            except Infeasible as error:
                capacity += max(error.needed_bytes or 0, (capacity // 64) << attempt, 4096)
        raise Infeasible(
            f"No schedule was found within {show_bytes(capacity)}, a little above the floor.",
            None,
            "Give a budget in bytes instead of 'minimum'.",
        )


def _rooms(capacity: int, floor: int, wanted_bytes: int) -> list[int]:
    """The wanted room for holes and smaller shares of it, as far as they leave the floor."""
    rooms = [int(wanted_bytes * share) for share in ROOMS]
    return [room for room in rooms if room and floor <= capacity - room]
