"""Strategies for plans: sensible ones, and arbitrary ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
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
    """Plans for the problem, with existing ids only.

    Sensible plans bring every operand to where it is needed and write back required values; they
    ignore capacities, so they are valid if there is enough room. The others are sensible plans with
    one or two faults, or arbitrary plans: most of them are invalid. `sensible=None` draws either.
    """
    st = strategies()

    def draw_plan(draw: Draw) -> Plan:
        senseless = draw(st.booleans()) if sensible is None else not sensible
        drawer = _AnyPlan(draw, st, problem, machine)
        if senseless and draw(st.booleans()):
            return drawer.plan()
        plan = Traveller(draw, st, problem, machine).plan()
        for _ in range(draw(st.integers(1, 2)) if senseless else 0):
            plan = drawer.disturbed(plan)
        return plan

    return composite(draw_plan)


class _AnyPlan:
    """Draws arbitrary plans from the existing ids."""

    def __init__(self, draw: Draw, st: Any, problem: Problem, machine: Machine) -> None:
        self.draw = draw
        self.st = st
        self.problem = problem
        self.machine = machine
        self.tensors = tuple(problem.tensor)
        self.ops = tuple(problem.op)
        self.tiers = tuple(machine.tier)

    def one(self, things: Sequence[Any]) -> Any:
        return self.draw(self.st.sampled_from(things))

    def several(self, make: Callable[[], Any], possible: bool) -> tuple[Any, ...]:
        return tuple(make() for _ in range(self.draw(self.st.integers(0, 3)) if possible else 0))

    def plan(self) -> Plan:
        tensors, ops, one = self.tensors, self.ops, self.one
        homes = tuple(
            Start(t.id, t.home)
            for t in self.problem.tensors
            if t.home is not None and t.home in self.tiers
        )
        anywhere = self.several(lambda: Start(one(tensors), one(self.tiers)), bool(tensors))
        weights = tuple(t.id for t in self.problem.tensors if t.kind == "weight")
        # mostly respect what ops allow, else nearly all plans would fail for the same few reasons
        loose = self.draw(self.st.integers(0, 4)) == 4
        again = [o.id for o in self.problem.ops if o.recompute or loose]
        direct = [
            (o.id, t) for o in self.problem.ops for t in (self.tensors if loose else o.direct)
        ]
        recomputes = self.several(lambda: Recompute(one(again), one(ops)), bool(again))
        names: list[str | None] = [None, *ops, *(r.id for r in recomputes)]
        possible = bool(tensors) and bool(self.machine.lanes)
        moves: list[Move] = []
        for i in range(self.draw(self.st.integers(0, 4)) if possible else 0):
            moves.append(self._move(f"m{i}", [*names, *(m.id for m in moves)], loose))
        triggers = [*names, *(m.id for m in moves)]
        return Plan(
            anywhere if self.draw(self.st.booleans()) else homes,
            tuple(moves),
            self.several(lambda: Drop(one(tensors), one(self.tiers), one(triggers)), bool(tensors)),
            self.several(lambda: Direct(*one(direct)), bool(direct)),
            recomputes,
            self.several(lambda: Update(one(weights), one((DEVICE, HOST))), bool(weights)),
        )

    def _move(self, name: str, triggers: Sequence[str | None], loose: bool) -> Move:
        lane = self.one(self.machine.lanes)
        source, target = lane.source, lane.target
        if loose:
            source, target = self.one(self.tiers), self.one(self.tiers)
        tensor = self.one(self.problem.tensors)
        codecs = [c for c in self.machine.codec if c in tensor.ratios or loose]
        return Move(
            name,
            tensor.id,
            source,
            target,
            lane.name,
            self.one(triggers),
            self.one([None, *self.ops]),
            self.problem.steady and self.one((False, True)),
            self.one([None, *codecs]),
        )

    def disturbed(self, plan: Plan) -> Plan:
        """Remove, reorder or change one entry of the plan."""
        parts = [f.name for f in fields(plan) if getattr(plan, f.name)]
        if not parts:
            return plan
        part = self.one(parts)
        entries = list(getattr(plan, part))
        at = self.draw(self.st.integers(0, len(entries) - 1))
        entry = entries.pop(at)
        how = self.one(("remove", "reorder", "change"))
        if how == "reorder":
            entries.insert(self.draw(self.st.integers(0, len(entries))), entry)
        elif how == "change":
            names: list[str | None] = [None, *self.ops, *(r.id for r in plan.recomputes)]
            names += [m.id for m in plan.moves]
            values: dict[str, Sequence[Any]] = {
                "tier": self.tiers,
                "after": names,
                "start_after": names,
                "ready_before": [None, *self.ops],
                "wraps": (False, True),
                "codec": [None, *self.machine.codec],
                "before": self.ops,
                "where": (DEVICE, HOST),
            }
            changeable = [f.name for f in fields(entry) if f.name in values]
            key = self.one(changeable) if changeable else None
            entry = replace(entry, **{key: self.one(values[key])}) if key else entry
            entries.insert(at, entry)
        return _without_loose_ends(replace(plan, **{part: tuple(entries)}), self.problem)


def _without_loose_ends(plan: Plan, problem: Problem) -> Plan:
    """Replace names that are no longer in the plan with None."""
    names = {*problem.op, *(r.id for r in plan.recomputes), *(m.id for m in plan.moves)}

    def there(name: str | None) -> str | None:
        return name if name in names else None

    moves = (
        replace(m, start_after=there(m.start_after), ready_before=there(m.ready_before))
        for m in plan.moves
    )
    drops = (replace(d, after=there(d.after)) for d in plan.drops)
    return replace(plan, moves=tuple(moves), drops=tuple(drops))
