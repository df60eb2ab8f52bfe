"""The runs of a plan, their order and their durations, derived from the contract alone.

Shared by the rules that need no run (`structure`) and the audit of a record (`timeline`);
nothing here comes from the planner or the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from offcompile.ir.model import DEVICE, HOST, Machine, Op, Problem, SharedLink
from offcompile.ir.plan import COMPUTE, HOST_COMPUTE, Move, Plan
from offcompile.ir.units import exact

HALF = Fraction(1, 2)


@dataclass(frozen=True)
class VerifiedRun:
    """One execution of an op: its listed one, or a recomputation."""

    id: str
    op: Op
    position: int  # in the listed order, recomputations included
    on_host: bool  # on the host_compute lane
    directs: frozenset[str]

    @property
    def lane(self) -> str:
        return HOST_COMPUTE if self.on_host else COMPUTE

    def tier_of(self, tensor: str) -> str:
        """The tier where this run reads or writes `tensor`."""
        return HOST if self.on_host or tensor in self.directs else DEVICE

    def duration_ns(self) -> int:
        if self.on_host:
            return to_ns(exact(self.op.host_duration_us or 0))
        plain = to_ns(exact(self.op.duration_us))
        extra = sum(to_ns(exact(self.op.direct[t])) - plain for t in self.directs)
        return max(0, plain + extra)


@dataclass(frozen=True)
class Touch:
    """One run that reads or writes a tensor."""

    run: VerifiedRun
    reads: bool


def link_us(problem: Problem, link: SharedLink, run: VerifiedRun) -> Fraction:
    """The time that a shared link takes for what the run accesses on the host."""
    nbytes = 0
    if not run.on_host and not run.directs:
        return Fraction(0)
    for tensor in run.op.operands:
        if run.tier_of(tensor) == HOST:
            size = problem.tensor[tensor].nbytes
            reads, writes = tensor in run.op.reads, tensor in run.op.writes
            if run.on_host:
                nbytes += size * (reads + writes) if link.updates else 0
            else:
                nbytes += size * (reads and link.in_place_reads)
                nbytes += size * (writes and link.in_place_writes)
    return nbytes / exact(link.bytes_per_us)


def to_ns(us: Fraction) -> int:
    """Whole nanoseconds, halves up."""
    return math.floor(us * 1000 + HALF)


def held_bytes(problem: Problem, tensor: str, codec: str | None) -> int:
    """Bytes that a copy of `tensor` takes, plain or compressed."""
    found = problem.tensor[tensor]
    if codec is None:
        return found.nbytes
    return math.ceil(found.nbytes * exact(found.ratios[codec]))


def move_duration_ns(problem: Problem, machine: Machine, move: Move) -> int:
    """Latency, then the slower of link and codec; with a codec the link moves packed bytes."""
    lane = machine.lane[move.lane]
    work_us = held_bytes(problem, move.tensor, move.codec) / exact(lane.bytes_per_us)
    if move.codec is not None:
        nbytes = problem.tensor[move.tensor].nbytes
        work_us = max(work_us, nbytes / exact(machine.codec[move.codec].bytes_per_us))
    return to_ns(exact(lane.latency_us) + work_us)


def arrives_as(move: Move) -> str | None:
    """The codec of the copy that `move` leaves on its target; None if it is plain."""
    return None if move.target == DEVICE else move.codec


def host_ops(problem: Problem, plan: Plan) -> frozenset[str]:
    """Ops that the plan's updates place on the host_compute lane."""
    weights = {u.weight for u in plan.updates if u.where == HOST}
    return frozenset(
        o.id for o in problem.ops if o.phase == "update" and not weights.isdisjoint(o.writes)
    )


def executed(problem: Problem, plan: Plan) -> tuple[VerifiedRun, ...]:
    """Every op and recomputation of one step in the listed order."""
    on_host = host_ops(problem, plan)
    directs: dict[str, set[str]] = {}
    for entry in plan.directs:
        directs.setdefault(entry.op, set()).add(entry.tensor)
    again: dict[str, list[tuple[str, str]]] = {}
    for entry_ in plan.recomputes:
        again.setdefault(entry_.before, []).append((entry_.id, entry_.op))
    order: list[VerifiedRun] = []
    for op in problem.ops:
        for run_id, op_id in (*again.get(op.id, ()), (op.id, op.id)):
            named = frozenset(directs.get(op_id, ()))
            here = op_id in on_host and run_id == op_id
            order.append(VerifiedRun(run_id, problem.op[op_id], len(order), here, named))
    return tuple(order)


def touches(runs: Iterable[VerifiedRun]) -> Mapping[str, tuple[Touch, ...]]:
    """The runs that touch each tensor, in the listed order."""
    found: dict[str, list[Touch]] = {}
    for run in runs:
        for tensor in run.op.operands:
            found.setdefault(tensor, []).append(Touch(run, tensor in run.op.reads))
    return {tensor: tuple(several) for tensor, several in found.items()}


def start_codecs(problem: Problem, plan: Plan) -> dict[tuple[str, str], str | None]:
    """The form of every start copy: the one that the last listed move to its tier leaves there.

    A problem that is not steady starts from its homes, which no move has touched: all plain.
    """
    last: dict[tuple[str, str], str | None] = {}
    if problem.steady:
        last = {(m.tensor, m.target): arrives_as(m) for m in plan.moves}
    places = dict.fromkeys((s.tensor, s.tier) for s in plan.start)
    return {place: last.get(place) for place in places}


def start_bytes(problem: Problem, plan: Plan) -> dict[str, int]:
    """Bytes that the start copies take, per tier. Every codec named must have its ratio."""
    total: dict[str, int] = {}
    for (tensor, tier), codec in start_codecs(problem, plan).items():
        total[tier] = total.get(tier, 0) + held_bytes(problem, tensor, codec)
    return total
