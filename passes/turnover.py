"""Evicts every saved activation until backward needs it: the worst-case plan.

It serves a graph that shares the device with others and cannot know the free memory when it is
planned. The graph's forward and backward run at separate times, and in between none of its
activations need be on the device. The runtime's keeper decides at run time, by the memory
available, which of them to move. So the plan is not optimized for speed: its first reload waits for
its last eviction.

With a price for each byte that leaves, ops run again in backward where that costs less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from offcompile.ir import (
    DEVICE,
    Drop,
    Infeasible,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Recompute,
    Start,
    Tensor,
)

from .build.contract import Judge
from .select.footprint import footprint
from .select.rematerialization import Rematerialization
from .step.lighter import Lighter

#: prices of a byte that are tried, as multiples of the time that a lane takes for it both ways
PRICES = tuple(2.0**power for power in range(-5, 5))
#: a way that saves less than this share more than the one before is no way of its own
FEWER_BYTES = 1 / 32
NS_PER_US = 1000


@dataclass(frozen=True)
class Turnover:
    """Evicts everything that lives from forward to backward in between.

    ns_per_byte: what it costs to let a byte leave and come back; ops run again where that takes
    less. With 0 none does.
    """

    name: ClassVar[str] = "turnover"

    ns_per_byte: float = 0.0
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.ns_per_byte < float("inf"):
            raise ValueError(f"ns_per_byte is {self.ns_per_byte}; it must be 0 or more")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        made = _plan(problem, machine, reruns_at(problem, self.ns_per_byte))
        timeline = None if self.judge is None else self.judge(problem, machine, made)
        if timeline is not None and not timeline.valid:
            raise Infeasible(
                "A plan by which all that forward saves leaves until backward does not run:"
                f" {timeline.violations[0].detail}.",
                None,
                "Raise the capacity of the tier named, or use the policy joint.",
            )
        return made


def reruns_at(problem: Problem, ns_per_byte: float) -> tuple[Recompute, ...]:
    """The ops that run again if a byte that is kept for backward costs so much, in the order in
    which they run."""
    if ns_per_byte <= 0 or problem.steady:
        return ()
    tensor, index = problem.tensor, problem.op_index
    found = Rematerialization.of(problem).reruns(lambda t: tensor[t].nbytes * ns_per_byte)
    in_order = sorted(found, key=lambda rerun: (index[rerun[1]], index[rerun[0]]))
    return tuple(Recompute(*rerun) for rerun in in_order)


def saved_with(problem: Problem, reruns: Sequence[Recompute]) -> tuple[Tensor, ...]:
    """The tensors that leave if these ops run again."""
    return tuple(one.tensor for one in _crossing(problem, _runs(problem, reruns)))


def more_held(problem: Problem, reruns: Sequence[Recompute]) -> int:
    """The bytes by which the step's peak grows if these ops run again and nothing moves."""
    again = {(rerun.op, rerun.before) for rerun in reruns}
    alone = max(footprint(problem, ()), default=0)
    return max(0, max(footprint(problem, again), default=0) - alone)


def lighter_ways(problem: Problem, machine: Machine) -> tuple[Lighter, ...]:
    """The ways in which one graph could save less for backward, the cheapest first."""
    tier = next(iter(_tiers(machine)), None)
    if tier is None:
        return ()
    lanes = _lane(machine, DEVICE, tier), _lane(machine, tier, DEVICE)
    both_ways_ns = sum(NS_PER_US / machine.lane[name].bytes_per_us for name in lanes)
    least = sum(t.nbytes for t in saved_with(problem, ()))
    found: list[Lighter] = []
    for price in PRICES:
        ns_per_byte = float(f"{price * both_ways_ns:.3g}")  # reports show it
        reruns = reruns_at(problem, ns_per_byte)
        saved = tuple((t.id, t.nbytes) for t in saved_with(problem, reruns))
        added_us = sum(problem.op[r.op].duration_us for r in reruns)
        way = Lighter(ns_per_byte, saved, added_us, more_held(problem, reruns))
        if way.saved_bytes < least * (1 - FEWER_BYTES):
            least = way.saved_bytes
            found.append(way)
    return tuple(found)


@dataclass(frozen=True)
class _Run:
    """A run of an op: the first one, or one in backward."""

    name: str
    op: Op
    again: bool = False


@dataclass(frozen=True)
class _Crossing:
    """A tensor between its last use in forward and its first in backward."""

    tensor: Tensor
    last: int
    first: int


def _runs(problem: Problem, reruns: Sequence[Recompute]) -> list[_Run]:
    before: dict[str, list[_Run]] = {}
    for rerun in reruns:
        before.setdefault(rerun.before, []).append(_Run(rerun.id, problem.op[rerun.op], True))
    return [run for op in problem.ops for run in (*before.get(op.id, ()), _Run(op.id, op))]


def _plan(problem: Problem, machine: Machine, reruns: tuple[Recompute, ...]) -> Plan:
    runs, tiers = _runs(problem, reruns), _tiers(machine)
    crossing = _crossing(problem, runs)
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
        outs.append(Move(out, t.id, DEVICE, tier, lane_out, runs[one.last].name, None))
        backs[t.id] = Move(back, t.id, tier, DEVICE, lane_in, None, runs[one.first].name)
    by_need = sorted(crossing, key=lambda c: (c.first, c.tensor.id))
    loads = [backs[c.tensor.id] for c in by_need if c.tensor.id in backs]
    made = [replace(m, start_after=outs[-1].id) for m in loads]
    if made:  # backward begins after the last eviction: no saved activation is left
        made[0] = replace(made[0], ready_before=runs[_turn(runs)].name)
    return Plan(
        start=tuple(Start(t.id, t.home) for t in problem.tensors if t.home is not None),
        moves=(*outs, *made),
        drops=tuple(Drop(m.tensor, DEVICE, m.id) for m in outs),
        recomputes=reruns,
    )


def _new_name(problem: Problem, name: str) -> str:
    while name in problem.op:
        name += "'"
    return name


def _turn(runs: Sequence[_Run]) -> int:
    """Returns the position of the first run in backward, or that of the end if there is none."""
    backward = (i for i, run in enumerate(runs) if run.again or run.op.phase == "backward")
    return next(backward, len(runs))


def _crossing(problem: Problem, runs: Sequence[_Run]) -> list[_Crossing]:
    turn = _turn(runs)
    if problem.steady:
        return []
    last: dict[str, int] = {}
    first: dict[str, int] = {}
    for i, run in enumerate(runs[:turn]):
        last.update((t, i) for t in run.op.operands)
    made_again: set[str] = set()
    for i, run in enumerate(runs[turn:], turn):
        for t in run.op.reads:
            if t not in made_again:
                first.setdefault(t, i)
        if run.again:
            made_again.update(run.op.writes)
    written = {t for run in runs[turn:] if not run.again for t in run.op.writes}
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
