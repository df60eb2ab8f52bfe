"""Evicts every saved activation until backward needs it: the worst-case plan.

It serves a graph that shares the device with others and cannot know the free memory when it is
planned. The graph's forward and backward run at separate times, and in between none of its
activations need be on the device. The runtime's keeper decides at run time, by the memory
available, which of them to move. So the plan is not optimized for speed: its first reload waits for
its last eviction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from offcompile.ir import DEVICE, Drop, Infeasible, Machine, Move, Plan, Problem, Start, Tensor

from .build.contract import Judge


@dataclass(frozen=True)
class Turnover:
    """Evicts everything that lives from forward to backward in between."""

    name: ClassVar[str] = "turnover"
    judge: Judge | None = None

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        made = _plan(problem, machine)
        timeline = None if self.judge is None else self.judge(problem, machine, made)
        if timeline is not None and not timeline.valid:
            raise Infeasible(
                "A plan by which all that forward saves leaves until backward does not run:"
                f" {timeline.violations[0].detail}.",
                None,
                "Raise the capacity of the tier named, or use the policy joint.",
            )
        return made


@dataclass(frozen=True)
class _Crossing:
    """A tensor between its last use in forward and its first in backward."""

    tensor: Tensor
    last: int
    first: int


def _plan(problem: Problem, machine: Machine) -> Plan:
    ops, tiers = problem.ops, _tiers(machine)
    crossing = _crossing(problem)
    room = {tier: machine.tier[tier].capacity_bytes for tier in tiers}
    outs: list[Move] = []
    backs: dict[str, Move] = {}
    for one in sorted(crossing, key=lambda c: (c.last, c.tensor.id)):
        t = one.tensor
        tier = next((x for x in tiers if _takes(room, x, t.nbytes)), None)
        if tier is None:
            continue
        lane_out, lane_in = _lane(machine, DEVICE, tier), _lane(machine, tier, DEVICE)
        out, back = _new_name(problem, f"{t.id}.out"), _new_name(problem, f"{t.id}.in")
        outs.append(Move(out, t.id, DEVICE, tier, lane_out, ops[one.last].id, None))
        backs[t.id] = Move(back, t.id, tier, DEVICE, lane_in, None, ops[one.first].id)
    by_need = sorted(crossing, key=lambda c: (c.first, c.tensor.id))
    loads = [backs[c.tensor.id] for c in by_need if c.tensor.id in backs]
    made = [replace(m, start_after=outs[-1].id) for m in loads]
    if made:  # backward begins after the last eviction: no saved activation is left
        made[0] = replace(made[0], ready_before=ops[_turn(problem)].id)
    return Plan(
        start=tuple(Start(t.id, t.home) for t in problem.tensors if t.home is not None),
        moves=(*outs, *made),
        drops=tuple(Drop(m.tensor, DEVICE, m.id) for m in outs),
    )


def _new_name(problem: Problem, name: str) -> str:
    while name in problem.op:
        name += "'"
    return name


def _turn(problem: Problem) -> int:
    """Returns the position of the first backward op, or that of the end if there is none."""
    backward = (i for i, op in enumerate(problem.ops) if op.phase == "backward")
    return next(backward, len(problem.ops))


def _crossing(problem: Problem) -> list[_Crossing]:
    turn = _turn(problem)
    if problem.steady:
        return []
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for i, op in enumerate(problem.ops):
        for t in op.operands:
            if i < turn:
                last[t] = i
            elif t in op.reads:
                first.setdefault(t, i)
    written = {t for op in problem.ops[turn:] for t in op.writes}
    return [
        _Crossing(problem.tensor[t], last[t], first[t])
        for t in first
        if t in last and t not in written and _may_leave(problem.tensor[t])
    ]


def _may_leave(tensor: Tensor) -> bool:
    return tensor.kind == "activation" and tensor.home is None and not tensor.pinned


def _tiers(machine: Machine) -> list[str]:
    """Returns the tiers that the device has lanes both to and from."""
    ways = {(lane.source, lane.target) for lane in machine.lanes}
    names = [t.name for t in machine.tiers if t.name != DEVICE]
    return [t for t in names if (DEVICE, t) in ways and (t, DEVICE) in ways]


def _lane(machine: Machine, source: str, target: str) -> str:
    found = [x for x in machine.lanes if (x.source, x.target) == (source, target)]
    return max(found, key=lambda x: x.bytes_per_us).name


def _takes(room: Mapping[str, int | None], tier: str, nbytes: int) -> bool:
    """Reserves `nbytes` of a tier's room; False if it does not have that much left."""
    assert isinstance(room, dict)
    left = room[tier]
    if left is None:
        return True
    if left < nbytes:
        return False
    room[tier] = left - nbytes
    return True
