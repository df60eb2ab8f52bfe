"""Weights and gradients that may move, and those of them that a slot cannot tell apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from offcompile.ir import HOST, Problem
from offcompile.passes.search.program_variant import held_on_host, hostable

from .slots import Slots, is_update

#: at most so many large updates must be made by one side as a whole: each may double the time for
#: an answer
MOST_LARGE = 4
#: at most so many updates that take the host this many slots have their sides chosen one by one, if
#: places are known
MOST_ALONE, LONG = 32, 2


@dataclass(frozen=True)
class WeightVisit:
    """Slots in which a weight is used, and the time it adds to its ops to access it in place; None:
    that cannot be."""

    first: int
    last: int
    in_place_us: float | None


@dataclass(frozen=True)
class GroupUpdate:
    """The update of a group. None for a side that cannot make it. ready: the first slot in which
    what it makes or needs may leave. large: one side has to make all of it. most_state_bytes: of
    the states of one weight."""

    slot: int
    ready: int
    large: bool
    state_bytes: int
    most_state_bytes: int
    gradient_bytes: int
    host_us: float | None
    device_us: float | None


@dataclass(frozen=True)
class WeightGroup:
    weights: tuple[str, ...]
    nbytes: int
    visits: tuple[WeightVisit, ...]
    update: GroupUpdate | None


@dataclass(frozen=True)
class GradientGroup:
    """Gradients that must outlast the step, on the device or on the host."""

    gradients: tuple[str, ...]
    nbytes: int
    slot: int
    in_place_us: float | None


@dataclass(frozen=True)
class Movable:
    weights: tuple[WeightGroup, ...]
    gradients: tuple[GradientGroup, ...]
    #: weights, states and gradients that are in these groups
    tensors: frozenset[str]


def movable(problem: Problem, slots: Slots, most_alone: int) -> Movable:
    """The groups, in the order of their first use. most_alone: number of large updates that are
    groups of their own."""
    tensor = problem.tensor
    weights = [t.id for t in problem.tensors if t.kind == "weight" and t.home == HOST]
    weights = [t for t in weights if not tensor[t].pinned]
    updates = hostable(problem)
    groups: dict[object, list[str]] = defaultdict(list)
    uses = _uses(problem, weights)
    held = held_on_host(problem)
    largest = _large(problem, slots, updates)
    whole = frozenset(largest[:MOST_LARGE])
    large = whole | frozenset(_large(problem, slots, updates, LONG)[:most_alone])
    for weight in weights:
        if uses[weight]:
            visits = _visits(problem, slots, weight, uses[weight])
            updated = (
                slots.of_op[problem.op_index[updates[weight][0]]] if weight in updates else None
            )
            places = tuple((v.first, v.last, v.in_place_us is None) for v in visits)
            alone = weight if weight in large else None
            groups[places, updated, weight in held, alone].append(weight)
    found = [
        _weight_group(problem, slots, members, uses, updates, held, members[0] in whole)
        for members in groups.values()
    ]
    gradients = _gradient_groups(problem, slots)
    moving = {w for group in found for w in group.weights} | {
        t
        for group in found
        for w in group.weights
        for u in updates.get(w, ())
        for t in problem.op[u].reads
        if tensor[t].kind in ("state", "gradient")
    }
    moving |= {g for group in gradients for g in group.gradients}
    return Movable(tuple(found), tuple(gradients), frozenset(moving))


def _large(
    problem: Problem, slots: Slots, updates: dict[str, tuple[str, ...]], count: int = 1
) -> list[str]:
    """Weights whose updates take the host longer than so many slots, the largest first."""
    host_us = {w: _host_us(problem, ops) for w, ops in updates.items()}
    return sorted((w for w in host_us if host_us[w] > count * slots.us), key=lambda w: -host_us[w])


def _host_us(problem: Problem, updates: Iterable[str]) -> float:
    return sum(problem.op[u].host_duration_us or 0.0 for u in updates)


def _uses(problem: Problem, weights: Iterable[str]) -> dict[str, list[int]]:
    """Weight → positions of the ops that use it, its updates aside."""
    found: dict[str, list[int]] = {w: [] for w in weights}
    for at, op in enumerate(problem.ops):
        if not is_update(op):
            for t in op.operands:
                if t in found:
                    found[t].append(at)
    return found


def _visits(
    problem: Problem, slots: Slots, weight: str, uses: Iterable[int]
) -> tuple[WeightVisit, ...]:
    found: list[WeightVisit] = []
    for at in uses:
        op, slot = problem.ops[at], slots.of_op[at]
        added_us = op.direct[weight] - op.duration_us if weight in op.direct else None
        if found and slot - found[-1].last <= 1:
            before = found.pop()
            both = added_us is not None and before.in_place_us is not None
            sum_us = (added_us or 0.0) + (before.in_place_us or 0.0) if both else None
            found.append(WeightVisit(before.first, slot, sum_us))
        else:
            found.append(WeightVisit(slot, slot, added_us))
    return tuple(found)


def _weight_group(
    problem: Problem,
    slots: Slots,
    weights: list[str],
    uses: dict[str, list[int]],
    updates: dict[str, tuple[str, ...]],
    held: frozenset[str],
    large: bool,
) -> WeightGroup:
    each = [_visits(problem, slots, w, uses[w]) for w in weights]
    visits = tuple(map(_together, zip(*each, strict=True)))
    nbytes = sum(problem.tensor[w].nbytes for w in weights)
    return WeightGroup(
        tuple(weights), nbytes, visits, _update(problem, slots, weights, updates, held, large)
    )


def _together(visits: tuple[WeightVisit, ...]) -> WeightVisit:
    """The visits of several weights in the same slots."""
    in_place = [v.in_place_us for v in visits if v.in_place_us is not None]
    return WeightVisit(
        visits[0].first,
        visits[0].last,
        sum(in_place) if in_place else None,
    )


def _update(
    problem: Problem,
    slots: Slots,
    weights: list[str],
    updates: dict[str, tuple[str, ...]],
    held: frozenset[str],
    large: bool,
) -> GroupUpdate | None:
    if weights[0] not in updates:
        return None
    ops = [problem.op[u] for w in weights for u in updates[w]]
    tensor = problem.tensor
    read = {t for op in ops for t in op.reads}
    states = [_state_bytes(problem, updates[w]) for w in weights]
    gradients = sum(tensor[t].nbytes for t in read if tensor[t].kind == "gradient")
    at = problem.op_index[ops[0].id]
    return GroupUpdate(
        slots.of_op[at],
        slots.after_op[at] if large else slots.of_op[at],
        large,
        sum(states),
        max(states),
        gradients,
        sum(op.host_duration_us or 0.0 for op in ops),
        None if weights[0] in held else sum(op.duration_us for op in ops),
    )


def _state_bytes(problem: Problem, updates: Iterable[str]) -> int:
    states = {t for u in updates for t in problem.op[u].reads if problem.tensor[t].kind == "state"}
    return sum(problem.tensor[t].nbytes for t in states)


def _gradient_groups(problem: Problem, slots: Slots) -> list[GradientGroup]:
    made = {t: at for at, op in enumerate(problem.ops) for t in op.writes}
    groups: dict[tuple[int, bool], list[str]] = defaultdict(list)
    for t in problem.tensors:
        leaves = t.kind == "gradient" and t.home is None and not t.pinned and t.id in made
        if leaves and problem.must_survive(t.id):
            op = problem.ops[made[t.id]]
            groups[slots.of_op[made[t.id]], t.id in op.direct].append(t.id)
    return [
        GradientGroup(
            tuple(members),
            sum(problem.tensor[t].nbytes for t in members),
            slot,
            sum(_added_us(problem, made[t], t) for t in members) if in_place else None,
        )
        for (slot, in_place), members in groups.items()
    ]


def _added_us(problem: Problem, at: int, tensor: str) -> float:
    op = problem.ops[at]
    return op.direct[tensor] - op.duration_us
