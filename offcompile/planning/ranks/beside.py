"""Simulates the plan of a step with its collectives beside it.

Collectives move over lanes and between tiers of their own. They take no memory here, since whoever
plans has counted it beside the plan's, and slow down on links that they share with each other and
with the plan's copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offcompile.ir import (
    DEVICE,
    Lane,
    Machine,
    Move,
    Plan,
    Problem,
    SharedLink,
    Start,
    Tensor,
    Tier,
    Timeline,
)
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS
from offcompile.simulate import Simulator

#: the queues of collectives: of weights and of gradients, each in its order
GATHER, REDUCE = "gather", "reduce"
#: the tiers that collectives move between
HERE, NEXT = "this rank", "the next rank"
#: prefix of tensors, moves, lanes and links that ranks send
RING = "ring: "


@dataclass(frozen=True)
class Collective:
    """One collective. It starts after an op (None: with the step), and an op waits for it (None:
    the end of the step)."""

    id: str
    #: `GATHER` or `REDUCE`
    queue: str
    #: bytes that this rank sends to the next one
    sent_bytes: int
    #: how often the ring passes something on
    hops: int
    after: str | None
    before: str | None = None
    #: gradients that may leave the device only afterwards
    gradients: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ring:
    """The way to the next rank. `takes_host_link`: it shares the card's link with copies."""

    bytes_per_us: float
    latency_us: float
    takes_host_link: bool

    @property
    def gbps(self) -> float:
        return self.bytes_per_us / BYTES_PER_US_PER_GBPS

    def time_us(self, collective: Collective) -> float:
        """The time of a collective that nothing else slows down."""
        return collective.hops * self.latency_us + collective.sent_bytes / self.bytes_per_us


def with_collectives(
    problem: Problem, machine: Machine, plan: Plan, ring: Ring, some: Sequence[Collective]
) -> Timeline:
    """Run the plan and the collectives on the same links."""
    step, links, asked = beside(problem, machine, plan, ring, some)
    return Simulator(step, links).run(asked, record=False)


def beside(
    problem: Problem, machine: Machine, plan: Plan, ring: Ring, some: Sequence[Collective]
) -> tuple[Problem, Machine, Plan]:
    """Add collectives to a step, to its machine and to its plan. Gradients leave the device once
    they are reduced; until then they lie in buckets, which the plan's memory does not include."""
    sent = [Tensor(f"{RING}{one.id}", one.sent_bytes, "input", HERE) for one in some]
    queued = [
        Move(
            f"{RING}{one.id}",
            tensor.id,
            HERE,
            NEXT,
            f"{RING}{one.queue}",
            start_after=one.after,
            ready_before=one.before,
        )
        for one, tensor in zip(some, sent, strict=True)
    ]
    asked = replace(
        plan,
        start=(*plan.start, *(Start(tensor.id, HERE) for tensor in sent)),
        moves=(*_after_reducing(problem, plan, some), *queued),
    )
    step = replace(problem, tensors=(*problem.tensors, *sent))
    capacity, leaving = machine.tier[DEVICE].capacity_bytes, {m.tensor for m in plan.moves}
    if capacity is not None:
        late = {g for one in some for g in one.gradients if g in leaving}
        capacity += sum(problem.tensor[gradient].nbytes for gradient in late)
        machine = machine.with_capacity(DEVICE, capacity)
    return step, _with_ring(machine, ring, some), asked


def _with_ring(machine: Machine, ring: Ring, some: Sequence[Collective]) -> Machine:
    hops = {one.queue: one.hops for one in some}
    lanes = tuple(
        Lane(f"{RING}{queue}", HERE, NEXT, ring.bytes_per_us, ring.latency_us * count)
        for queue, count in hops.items()
    )
    names = tuple(lane.name for lane in lanes)
    shared = [SharedLink(f"{RING}link", ring.bytes_per_us, names)]
    for lane in machine.lanes:
        if ring.takes_host_link and DEVICE in (lane.source, lane.target):
            # sent and received at once, so they take both directions
            shared.append(SharedLink(f"{RING}{lane.name}", lane.bytes_per_us, (lane.name, *names)))
    return replace(
        machine,
        tiers=(*machine.tiers, Tier(HERE), Tier(NEXT)),
        lanes=(*machine.lanes, *lanes),
        shared=(*machine.shared, *shared),
    )


def _after_reducing(problem: Problem, plan: Plan, some: Sequence[Collective]) -> list[Move]:
    """Return the moves of the plan, with those of gradients off the device after their collective.
    In their lane they come before whatever starts later than that anyway."""
    reduced = {gradient: one for one in some for gradient in one.gradients}
    at = problem.op_index

    def begins(move: Move) -> int:
        return -1 if move.start_after is None else at.get(move.start_after, -1)

    found = list[Move]()
    #: per lane: position of the op before the collective, and the move that waits for it
    late = dict[str, list[tuple[int, Move]]]()
    for move in plan.moves:
        waiting, own = late.setdefault(move.lane, []), begins(move)
        if waiting and own > min(position for position, _ in waiting):
            found += (other for position, other in waiting if position < own)
            waiting[:] = [(position, other) for position, other in waiting if position >= own]
        one = reduced.get(move.tensor)
        if one is None or one.after is None or move.source != DEVICE or own > at[one.after]:
            found.append(move)
        else:
            waiting.append((at[one.after], replace(move, start_after=f"{RING}{one.id}")))
    return found + [move for waiting in late.values() for _, move in waiting]
