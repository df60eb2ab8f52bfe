"""Under a budget: does the step fit as it is, and if not, which plan makes it fit?"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offcompile.ir import DEVICE, Infeasible, Machine, Plan, Problem, Start
from offcompile.ir.units import show_bytes
from offcompile.passes.search.frame import Choices, ProgramVariant, direct_mode, held_on_host
from offcompile.runtime.base.garbage import rarely_collected
from offcompile.simulate import Simulator

from .order import Order, static_order
from .planner import Beaten, PlanResult, plan_problem

#: planning time: this much, and more for each op, within bounds
BASE_SECONDS, SECONDS_PER_OP, MOST_SECONDS = 0.3, 0.003, 4.2
#: no longer than so many steps take: what a search could still gain of them is less
MOST_STEPS, LEAST_SECONDS = 100, 0.2
US_PER_S = 1e6
#: how often the floor is raised when no schedule is found exactly at it
MOST_RAISES = 8
#: room for holes is worth this much of a step (measured: docs/backend.md), beside what is known of
#: touching memory again; a plan that loses no more than the smaller share is taken uncompared
HOLES_COST, NO_LOSS = 0.02, 0.005
#: what of the room that would be good is tried, until there is a plan with it
ROOMS = (1, 3 / 4, 1 / 2, 1 / 4)
#: ops of a step whose search takes half a minute: its plan with room for holes is the only one
MANY_OPS = 2000
#: a floor above the capacity by this factor is not brought down by computing small tensors again
HOPELESS = 1.25


@dataclass(frozen=True)
class Decided:
    """What was decided, on which machine, and the order in which it will run."""

    result: PlanResult
    machine: Machine
    order: Order
    #: whether nothing needs to move, so that the graphs stay as they are
    fits: bool
    #: of the budget, beside the runtime's reserve, what the plan leaves to holes between tensors
    holes_bytes: int = 0
    #: what forward leaves on the device for backward, where that was planned (`turn`)
    kept: frozenset[str] | None = None
    #: what touching again takes of the memory that goes back to the system meanwhile; 0: not known
    touching_us: float = 0.0

    @property
    def cost_us(self) -> float:
        """What a step will take: what plans are compared by."""
        return self.result.cost_us + self.touching_us


@dataclass(frozen=True)
class Holes:
    """What holes between tensors mean where memory is a heap: the room that they would have of a
    budget, and what a plan loses by touching again what went back for want of it.

    touching_us: None where that is not known.
    """

    wanted_bytes: int
    touching_us: Callable[[Machine, PlanResult], float] | None = None


@dataclass(frozen=True)
class _Planned:
    machine: Machine
    result: PlanResult
    holes_bytes: int = 0
    touching_us: float = 0.0

    @property
    def cost_us(self) -> float:
        return self.result.cost_us + self.touching_us


def plain_plan(problem: Problem) -> Plan:
    """Everything stays where it is."""
    return Plan(start=tuple(Start(t.id, t.home) for t in problem.tensors if t.home is not None))


def planning_seconds(problem: Problem) -> float:
    """How long to search unless the user says."""
    steps_s = MOST_STEPS * sum(op.duration_us for op in problem.ops) / US_PER_S
    wanted = min(MOST_SECONDS, BASE_SECONDS + SECONDS_PER_OP * len(problem.ops))
    return max(LEAST_SECONDS, min(wanted, steps_s))


def decide(
    problem: Problem,
    machine_for: Callable[[int], Machine],
    budget_bytes: int | None,
    reserve_for: Callable[[int], int],
    policy: str,
    seconds: float | None = None,
    progress: Callable[[str], None] | None = None,
    held_bytes: int = 0,
    holes: Holes | None = None,
    may_fit: bool = True,
    known: Sequence[Plan] = (),
    worth_us: float = float("inf"),
) -> Decided:
    """A plan within the budget (None: the floor). Raises `Infeasible` with figures, and `Beaten`
    if no plan can take less than `worth_us`.

    `machine_for` gives the machine whose device holds so many bytes and `reserve_for` what the
    runtime itself takes of a budget once anything moves, to which holes come; `held_bytes` of what
    the user gave are other graphs' and are not in `budget_bytes`.
    Without `may_fit`, something has to move anyway (weights live on the host).
    """
    capacity = budget_bytes if budget_bytes is not None else floor_of(problem, machine_for)
    if may_fit:
        fitting = _as_it_is(problem, machine_for, capacity, budget_bytes)
        if fitting is not None:
            return fitting
    compute_us = sum(op.duration_us for op in problem.ops)
    spend = seconds or planning_seconds(problem)
    touching = None if holes is None else holes.touching_us
    roomy: _Planned | None = None

    def planned(capacity: int, holes_bytes: int = 0, worth_us: float = worth_us) -> _Planned:
        machine = machine_for(max(1, capacity - holes_bytes))
        seeds = known if roomy is None else [*known, roomy.result.plan]
        with rarely_collected():
            result = plan_problem(problem, machine, policy, spend, progress, seeds, worth_us)
        touching_us = 0.0 if touching is None else touching(machine, result)
        return _Planned(machine, result, holes_bytes, touching_us)

    if budget_bytes is None:
        found = _near_floor(planned, capacity)
    else:
        capacity = budget_bytes - reserve_for(budget_bytes)
        floor = floor_of(problem, machine_for)
        if holes is not None:
            roomy = _with_room(planned, capacity, floor, holes.wanted_bytes)
        if roomy is not None and (
            worth_us < float("inf")  # plans that are only compared all leave that room
            or roomy.cost_us <= compute_us * (1 + NO_LOSS)
            or len(problem.ops) > MANY_OPS  # a second search takes longer than it can save
        ):
            found = roomy
        elif roomy is not None:
            # a plan without room for holes must gain more than the holes cost
            worth_us = roomy.cost_us / (1 + HOLES_COST)
            found = roomy
            with contextlib.suppress(Infeasible, Beaten):
                tight = planned(capacity, worth_us=worth_us)
                found = tight if tight.cost_us < worth_us else roomy
        else:
            refusing = (problem, machine_for, policy, budget_bytes, reserve_for, held_bytes)
            if floor > capacity * HOPELESS and (refusal := _with_budget(None, *refusing)):
                raise refusal
            try:
                found = planned(capacity)
            except Infeasible as error:
                refusal = _with_budget(error.needed_bytes, *refusing)
                raise refusal or Infeasible(
                    f"The budget of {show_bytes(budget_bytes)} is above the floor, but no order of"
                    " moves was found within it.",
                    None,
                    "Set memory to 'minimum', or to a little more.",
                ) from None
    machine, result = found.machine, found.result
    order = static_order(problem, machine, result.plan, result.timeline)
    return Decided(result, machine, order, False, found.holes_bytes, touching_us=found.touching_us)


def fits_as_it_is(
    problem: Problem, machine_for: Callable[[int], Machine], budget_bytes: int
) -> bool:
    """Whether the step is within the budget with nothing moved."""
    return _as_it_is(problem, machine_for, budget_bytes, budget_bytes) is not None


def peak_alone(problem: Problem, machine_for: Callable[[int], Machine]) -> int:
    """What the step holds at most with nothing moved."""
    timeline = Simulator(problem, machine_for(_total_bytes(problem))).run(plain_plan(problem))
    return timeline.peak_bytes[DEVICE]


def _as_it_is(
    problem: Problem,
    machine_for: Callable[[int], Machine],
    capacity: int,
    budget_bytes: int | None,
) -> Decided | None:
    """The step in which nothing moves, if that is within the capacity."""
    plain = plain_plan(problem)
    timeline = Simulator(problem, machine_for(_total_bytes(problem))).run(plain)
    peak = timeline.peak_bytes[DEVICE]
    if peak > capacity:
        return None
    machine = machine_for(max(peak, budget_bytes or peak))
    result = PlanResult(plain, timeline, "none", 0.0, timeline.makespan_us, "compute")
    return Decided(result, machine, static_order(problem, machine, plain, timeline), True)


def _with_room(
    planned: Callable[[int, int], _Planned], capacity: int, floor: int, wanted_bytes: int
) -> _Planned | None:
    """A plan that leaves the room that is wanted, or as much of it as there is."""
    for share in ROOMS:
        room = int(wanted_bytes * share)
        if room and floor <= capacity - room:
            with contextlib.suppress(Infeasible):
                return planned(capacity, room)
    return None


def _near_floor(planned: Callable[[int], _Planned], capacity: int) -> _Planned:
    """The plan with the least capacity at which a schedule is found."""
    for attempt in range(MOST_RAISES):
        try:
            return planned(capacity)
        except Infeasible as error:
            capacity += max(error.needed_bytes or 0, (capacity // 64) << attempt, 4096)
    raise Infeasible(
        f"No schedule was found within {show_bytes(capacity)}, a little above the floor.",
        None,
        "Give a budget in bytes instead of 'minimum'.",
    )


def floor_of(problem: Problem, machine_for: Callable[[int], Machine]) -> int:
    """The most that the device must hold at one op when whatever can leave has left."""
    return max(_floor_per_op(problem, machine_for)[1], default=0)


def floors_by_run(problem: Problem, machine_for: Callable[[int], Machine]) -> dict[str, int]:
    """For each run, what the device must hold at it when whatever can leave has left."""
    frame, floors = _floor_per_op(problem, machine_for)
    return {run.name: nbytes for run, nbytes in zip(frame.program.runs, floors, strict=True)}


def _floor_per_op(
    problem: Problem, machine_for: Callable[[int], Machine]
) -> tuple[ProgramVariant, list[int]]:
    machine = machine_for(1)
    copied = Choices(hosted=held_on_host(problem))
    in_place = direct_mode(problem, machine)
    frames = [ProgramVariant(problem, machine, m) for m in dict.fromkeys((copied, in_place))]
    frame = min(frames, key=lambda f: max(f.floor, default=0))
    return frame, frame.floor


def _with_budget(
    missing_bytes: int | None,
    problem: Problem,
    machine_for: Callable[[int], Machine],
    policy: str,
    budget_bytes: int,
    reserve_for: Callable[[int], int],
    held_bytes: int,
) -> Infeasible | None:
    """The refusal in terms of the budget that the user gave; None: the floor does not forbid it.

    `missing_bytes` is what the planner said is missing, if it did.
    """
    frame, floors = _floor_per_op(problem, machine_for)
    worst = max(range(len(floors)), key=floors.__getitem__)
    needed = floors[worst]
    if missing_bytes is not None:
        needed = budget_bytes - reserve_for(budget_bytes) + missing_bytes
    total = with_reserve(needed, reserve_for)
    if total <= budget_bytes:
        return None
    if needed > floors[worst] and policy.partition(":")[0] != "joint":
        least = with_reserve(floors[worst], reserve_for)
        return Infeasible(
            f"The budget of {show_bytes(budget_bytes)} is not enough for {policy}, which needs"
            f" {show_bytes(total)}; the floor is {show_bytes(least)}.",
            total - budget_bytes,
            f"Set memory to '{round_up(total + held_bytes)}' or more, use the policy joint, or"
            " make the batch smaller.",
        )
    run = frame.program.runs[worst]
    parts = _held_at(problem, run.op.id, worst, frame)
    reserve = total - needed
    own = f", and the runtime {show_bytes(reserve)} of buffers" if reserve else ""
    beside = ""
    if held_bytes:
        beside = f" (what is left beside {show_bytes(held_bytes)} of other graphs and runs)"
    return Infeasible(
        f"The budget of {show_bytes(budget_bytes)}{beside} is below the floor of"
        f" {show_bytes(total)}: at {run.name} the device must hold {parts}{own}.",
        total - budget_bytes,
        f"Set memory to '{round_up(total + held_bytes)}' or more, or make the batch smaller.",
    )


def with_reserve(needed: int, reserve_for: Callable[[int], int]) -> int:
    """The budget that leaves so much beside the runtime's reserve."""
    total = needed + reserve_for(needed)
    while total - reserve_for(total) < needed:
        total += needed - (total - reserve_for(total))
    return total


def with_figure(error: Infeasible, total_bytes: int, budget_bytes: int) -> Infeasible:
    """The same refusal with a budget for which there is a plan, if it names less."""
    if error.needed_bytes is not None and budget_bytes + error.needed_bytes >= total_bytes:
        return error
    return Infeasible(
        error.reason,
        total_bytes - budget_bytes,
        f"Set memory to '{round_up(total_bytes)}' or more, or make the batch smaller.",
    )


def _held_at(problem: Problem, op_id: str, position: int, frame: ProgramVariant) -> str:
    """What makes the floor at one op, largest first."""
    op = problem.op[op_id]
    own = [problem.tensor[t] for t in op.operands]
    ids = {t.id for t in own}
    fixed: dict[str, int] = {}
    for tensor in problem.tensors:
        if tensor.id in ids:
            continue
        begun = tensor.home == DEVICE or (
            tensor.home is None
            and any(a.position <= position for a in frame.program.accesses[tensor.id])
        )
        if begun and tensor.pinned and tensor.kind in ("weight", "gradient", "input", "output"):
            fixed[tensor.kind] = fixed.get(tensor.kind, 0) + tensor.nbytes
    found = [(n, f"{show_bytes(n)} of {kind}s") for kind, n in fixed.items() if n]
    found += [(t.nbytes, f"{t.id} ({show_bytes(t.nbytes)})") for t in own if t.nbytes]
    if op.workspace_bytes:
        found.append((op.workspace_bytes, f"workspace ({show_bytes(op.workspace_bytes)})"))
    found.sort(key=lambda f: -f[0])
    return ", ".join(text for _, text in found[:8]) + (", …" if len(found) > 8 else "")


def round_up(nbytes: int) -> str:
    """A size to type in: three digits, never less than what is needed."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            digits = 2 if nbytes < 10 * unit else 1 if nbytes < 100 * unit else 0
            return f"{math.ceil(nbytes / unit * 10**digits) / 10**digits:.{digits}f}{name}"
    return str(nbytes)


def _total_bytes(problem: Problem) -> int:
    work = max((o.workspace_bytes for o in problem.ops), default=0)
    return max(1, work + sum(t.nbytes for t in problem.tensors))
