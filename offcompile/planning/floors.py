"""The least memory that a step needs: with nothing moved, and with everything that can leave; and
the refusals of budgets below that."""

from __future__ import annotations

from collections.abc import Callable

from offcompile.ir import DEVICE, Infeasible, Machine, Plan, Problem, Start
from offcompile.ir.units import show_bytes, size_to_ask
from offcompile.passes.search.program_variant import (
    Choices,
    ProgramVariant,
    direct_choices,
    held_on_host,
)
from offcompile.simulate import Simulator


def plain_plan(problem: Problem) -> Plan:
    """The plan in which everything stays where it is."""
    return Plan(start=tuple(Start(t.id, t.home) for t in problem.tensors if t.home is not None))


def peak_alone(problem: Problem, machine_for: Callable[[int], Machine]) -> int:
    """The step's peak of device bytes with nothing moved."""
    timeline = Simulator(problem, machine_for(total_bytes(problem))).run(plain_plan(problem))
    return timeline.peak_bytes[DEVICE]


def floor_of(problem: Problem, machine_for: Callable[[int], Machine]) -> int:
    """The peak of device bytes over all ops if everything evictable is off the device."""
    return max(floor_per_op(problem, machine_for)[1], default=0)


def room_above(floor_bytes: int, machine: Machine, problem: Problem) -> int:
    """The device memory left at the op that needs most of it; without a limit, all that there is
    a use for."""
    capacity = machine.tier[DEVICE].capacity_bytes
    if capacity is None:
        return sum(t.nbytes for t in problem.tensors)
    return max(0, capacity - floor_bytes)


def floors_by_run(problem: Problem, machine_for: Callable[[int], Machine]) -> dict[str, int]:
    """The device bytes at each run if everything evictable is off the device."""
    variant, floors = floor_per_op(problem, machine_for)
    return {run.name: nbytes for run, nbytes in zip(variant.program.runs, floors, strict=True)}


def floors_of_ways(
    problem: Problem, machine_for: Callable[[int], Machine]
) -> tuple[list[int], ...]:
    """The device bytes at each run if everything evictable is off the device: with weights copied,
    and with weights accessed in place."""
    return tuple(variant.floor for variant in _floor_variants(problem, machine_for))


def _floor_variants(
    problem: Problem, machine_for: Callable[[int], Machine]
) -> list[ProgramVariant]:
    machine = machine_for(1)
    copied = Choices(hosted=held_on_host(problem))
    in_place = direct_choices(problem, machine)
    return [ProgramVariant(problem, machine, m) for m in dict.fromkeys((copied, in_place))]


def floor_per_op(
    problem: Problem, machine_for: Callable[[int], Machine]
) -> tuple[ProgramVariant, list[int]]:
    variant = min(_floor_variants(problem, machine_for), key=lambda f: max(f.floor, default=0))
    return variant, variant.floor


def with_reserve(needed: int, reserve_for: Callable[[int], int]) -> int:
    """The budget that leaves `needed` bytes beside the runtime's reserve."""
    total = needed + reserve_for(needed)
    while total - reserve_for(total) < needed:
        total += needed - (total - reserve_for(total))
    return total


def total_bytes(problem: Problem) -> int:
    work = max((o.workspace_bytes for o in problem.ops), default=0)
    return max(1, work + sum(t.nbytes for t in problem.tensors))


def refusal_within(
    problem: Problem,
    machine_for: Callable[[int], Machine],
    reserve_for: Callable[[int], int],
    policy: str,
    budget_bytes: int,
    held_bytes: int,
    missing_bytes: int | None = None,
) -> Infeasible | None:
    """The refusal in terms of the user's budget; None if the budget is not below the floor.

    `missing_bytes` is the shortage that the planner reported, if it did.
    """
    variant, floors = floor_per_op(problem, machine_for)
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
            f"The budget of {show_bytes(budget_bytes)} is not enough for {policy}, which"
            f" needs {show_bytes(total)}; the floor is {show_bytes(least)}.",
            total - budget_bytes,
            f"Set memory to '{size_to_ask(total + held_bytes)}' or more, use the policy joint, or"
            " make the batch smaller.",
        )
    run = variant.program.runs[worst]
    parts = variant.held_in_words(worst)
    reserve = total - needed
    own = f", and the runtime {show_bytes(reserve)} of buffers" if reserve else ""
    beside = ""
    if held_bytes:
        beside = f" (what is left beside {show_bytes(held_bytes)} that others hold)"
    return Infeasible(
        f"The budget of {show_bytes(budget_bytes)}{beside} is below the floor of"
        f" {show_bytes(total)}: at {run.name} the device must hold {parts}{own}.",
        total - budget_bytes,
        f"Set memory to '{size_to_ask(total + held_bytes)}' or more, or make the batch smaller.",
    )


def with_figure(error: Infeasible, total_bytes: int, budget_bytes: int) -> Infeasible:
    """The same refusal, naming a feasible budget instead if its own is smaller."""
    if error.needed_bytes is not None and budget_bytes + error.needed_bytes >= total_bytes:
        return error
    return Infeasible(
        error.reason,
        total_bytes - budget_bytes,
        f"Set memory to '{size_to_ask(total_bytes)}' or more, or make the batch smaller.",
    )
