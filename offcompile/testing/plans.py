"""Strategies for plans: sensible ones, and whatever can be written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from offcompile.ir import (
    DEVICE,
    HOST,
    Direct,
    Drop,
    Machine,
    Move,
    Plan,
    Problem,
    Recompute,
    Start,
    Update,
)

from .drawing import Draw, composite, strategies
from .journeys import Traveller

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


def plans(
    problem: Problem, machine: Machine, *, sensible: bool | None = None
) -> SearchStrategy[Plan]:
    """Plans for the problem, whose ids all exist.

    Sensible ones bring every operand to where it is needed and write back what they must; they
    look away only from capacities, so they are valid where there is room. The others name
    whatever there is, and are mostly invalid. None draws either.
    """
    st = strategies()

    def draw_plan(draw: Draw) -> Plan:
        with_sense = draw(st.booleans().map(lambda x: not x)) if sensible is None else sensible
        if with_sense:
            return Traveller(draw, st, problem, machine).plan()
        return _any_plan(draw, st, problem, machine)

    return composite(draw_plan)


def _any_plan(draw: Draw, st: Any, problem: Problem, machine: Machine) -> Plan:
    """Whatever can be written with the ids that there are."""

    def several(make: Callable[[], Any], possible: bool) -> tuple[Any, ...]:
        return tuple(make() for _ in range(draw(st.integers(0, 3)) if possible else 0))

    def one(things: Sequence[Any]) -> Any:
        return draw(st.sampled_from(things))

    tensors, ops, tiers = tuple(problem.tensor), tuple(problem.op), tuple(machine.tier)
    weights = tuple(t.id for t in problem.tensors if t.kind == "weight")
    both = bool(tensors and ops)
    recomputes = several(lambda: Recompute(one(ops), one(ops)), bool(ops))
    names: list[str | None] = [None, *ops, *(r.id for r in recomputes)]
    moves: list[Move] = []
    for i in range(draw(st.integers(0, 4)) if tensors and machine.lanes else 0):
        lane = one(machine.lanes)
        ends = (lane.source, lane.target) if draw(st.integers(0, 9)) < 9 else (one(tiers),) * 2
        trigger, reader = one([*names, *(m.id for m in moves)]), one([None, *ops])
        codec = one([None, *machine.codec])
        moves.append(
            Move(
                f"m{i}", one(tensors), *ends, lane.name, trigger, reader, draw(st.booleans()), codec
            )
        )
    triggers = [*names, *(m.id for m in moves)]
    homes = tuple(Start(t.id, t.home) for t in problem.tensors if t.home)
    anywhere = several(lambda: Start(one(tensors), one(tiers)), bool(tensors))
    return Plan(
        homes if draw(st.booleans()) else anywhere,
        tuple(moves),
        several(lambda: Drop(one(tensors), one(tiers), one(triggers)), bool(tensors)),
        several(lambda: Direct(one(ops), one(tensors)), both),
        recomputes,
        several(lambda: Update(one(weights), one((HOST, DEVICE))), bool(weights)),
    )
