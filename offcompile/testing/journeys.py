"""Draws sensible plans tensor by tensor: where it is needed, and where it goes in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from offcompile.ir import (
    DEVICE,
    HOST,
    SELF_ENDING_KINDS,
    Direct,
    Drop,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Recompute,
    Start,
    Tensor,
    Update,
)

from .drawing import Draw


@dataclass(frozen=True)
class Visit:
    """One run of an op in plan order, with the operands that it uses in place on the host."""

    name: str
    op: Op
    in_place: frozenset[str]

    def tier(self, tensor: str) -> str:
        return HOST if tensor in self.in_place else DEVICE


class Traveller:
    """Draws plans tensor by tensor: each moves to its next access, and is evicted at random."""

    def __init__(self, draw: Draw, st: Any, problem: Problem, machine: Machine) -> None:
        self.draw = draw
        self.st = st
        self.problem = problem
        self.machine = machine
        self.starts: list[Start] = []
        self.moves: list[tuple[int, Move]] = []  # (index of the visit that it follows, move)
        self.drops: list[Drop] = []
        self.directs: list[Direct] = []
        self.recomputes: list[Recompute] = []
        self.updates: list[Update] = []

    def chance(self) -> bool:
        return bool(self.draw(self.st.booleans()))

    def plan(self) -> Plan:
        self.visits = list(self._visits())
        for tensor in self.problem.tensors:
            self._journey(tensor)
        # a lane serves moves in listed order, so list them in the order in which they may start
        moves = tuple(move for _, move in sorted(self.moves, key=lambda pair: pair[0]))
        return Plan(
            tuple(self.starts),
            moves,
            tuple(self.drops),
            tuple(self.directs),
            tuple(self.recomputes),
            tuple(self.updates),
        )

    def _visits(self) -> Iterator[Visit]:
        """Yield the ops in order, with randomly drawn recomputations, host updates and directs."""
        self._draw_updates()
        on_host = {u.weight for u in self.updates if u.where == HOST}
        in_place: dict[str, frozenset[str]] = {}
        for op in self.problem.ops:
            if op.phase == "update" and on_host & set(op.writes):
                in_place[op.id] = frozenset(op.operands)
            else:
                taken = [t for t in op.direct if self._may_access(t) and self.chance()]
                self.directs += [Direct(op.id, t) for t in taken]
                in_place[op.id] = frozenset(taken)
        for i, op in enumerate(self.problem.ops):
            for again in self.problem.ops[:i]:
                if op.id not in self._host_ops() and self._repeatable(again, op) and self.chance():
                    recompute = Recompute(again.id, op.id)
                    self.recomputes.append(recompute)
                    yield Visit(recompute.id, again, in_place[again.id])
            yield Visit(op.id, op, in_place[op.id])

    def _may_access(self, tensor: str) -> bool:
        """True if it may be used in place on the host."""
        return HOST in self.machine.tier and not self.problem.tensor[tensor].pinned

    def _draw_updates(self) -> None:
        for tensor in self.problem.tensors:
            writers = [o for o in self.problem.ops if o.phase == "update" and tensor.id in o.writes]
            if tensor.kind != "weight" or len(writers) != 1 or HOST not in self.machine.tier:
                continue
            taken = {u.weight for u in self.updates}
            free = writers[0].host_duration_us is not None and not taken & set(writers[0].writes)
            free = free and all(map(self._may_access, writers[0].operands))
            if free and self.chance():
                self.updates.append(Update(tensor.id, HOST))

    def _host_ops(self) -> set[str]:
        on_host = {u.weight for u in self.updates}
        return {o.id for o in self.problem.ops if o.phase == "update" and on_host & set(o.writes)}

    def _repeatable(self, op: Op, before: Op) -> bool:
        """True if rerunning `op` would restore values that it wrote and `before` reads."""
        kinds = {self.problem.tensor[t].kind for t in op.writes}
        between = self.problem.ops[
            self.problem.op_index[op.id] + 1 : self.problem.op_index[before.id]
        ]
        changed = {t for o in between for t in o.writes} & set(op.operands)
        return (
            op.recompute
            and op.id not in self._host_ops()
            and kinds <= SELF_ENDING_KINDS
            and bool(set(op.writes) & set(before.reads))
            and not changed
        )

    def _journey(self, tensor: Tensor) -> None:
        """Draw the moves and drops of one tensor throughout the step."""
        accesses = [
            (i, v.tier(tensor.id), tensor.id in v.op.reads, tensor.id in v.op.writes)
            for i, v in enumerate(self.visits)
            if tensor.id in v.op.operands
        ]
        trip = Trip(self, tensor)
        born = bool(accesses) and not accesses[0][2]  # written before it is read
        if self.problem.steady and not born and tensor.kind not in SELF_ENDING_KINDS:
            anywhere = DEVICE if tensor.pinned else None
            anywhere = anywhere or self.draw(self.st.sampled_from(tuple(self.machine.tier)))
            trip.copies = {anywhere: None}
        elif not self.problem.steady and tensor.home is not None:
            trip.copies = {tensor.home: None}
        start = dict(trip.copies)
        # compressed copies cannot be used in place, nor be where the step begins with plain ones
        trip.may_code = set(start) <= {DEVICE} and all(a[1] == DEVICE for a in accesses)
        for (i, tier, reads, writes), following in zip_longest(accesses, accesses[1:]):
            if reads:
                trip.fetch(tier, i)
            if writes:
                trip.copies = {tier: None}
            trip.last = i
            needed = following[2] if following else self.problem.steady and not born
            if following and not needed and self.problem.must_survive(tensor.id):
                continue  # a late write-back would overwrite the next value
            trip.leave(tier, following[1] if following and needed else None, bool(needed))
        if self.problem.steady and not born:
            trip.return_to(start, self.visits[accesses[0][0]].name if accesses else None)
        elif self.problem.steady and tensor.kind not in SELF_ENDING_KINDS:
            start = trip.copies
        self.starts += [Start(tensor.id, tier) for tier in start]


class Trip:
    """Tracks the valid copies of one tensor through a step (tier → codec of the copy)."""

    def __init__(self, plan: Traveller, tensor: Tensor) -> None:
        self.plan = plan
        self.tensor = tensor
        self.may_code = False
        self.copies: dict[str, str | None] = {}
        self.last = -1  # the last visit that touched it

    def _path(self, sources: Sequence[str], target: str) -> list[Lane] | None:
        """The shortest path of lanes from any of the sources to the target."""
        paths: list[list[Lane]] = [
            [lane] for lane in self.plan.machine.lanes if lane.source in sources
        ]
        seen = set(sources)
        while paths:
            path, *paths = paths
            if path[-1].target == target:
                return path
            if path[-1].target not in seen:
                seen.add(path[-1].target)
                paths += [
                    [*path, x] for x in self.plan.machine.lanes if x.source == path[-1].target
                ]
        return None

    def _move(
        self,
        lane: Lane,
        after: str | None,
        at: int,
        before: str | None,
        codec: str | None = None,
        wraps: bool = False,
    ) -> str:
        plan = self.plan
        codec = self.copies[lane.source] if lane.source != DEVICE else codec
        move = Move(
            f"m{len(plan.moves)}",
            self.tensor.id,
            lane.source,
            lane.target,
            lane.name,
            after,
            before,
            wraps,
            codec,
        )
        plan.moves.append((at, move))
        self.copies[lane.target] = codec if lane.target != DEVICE else None
        return move.id

    def _drop(self, tier: str, after: str | None) -> None:
        self.plan.drops.append(Drop(self.tensor.id, tier, after))
        self.copies.pop(tier, None)

    def fetch(self, tier: str, visit: int) -> None:
        """Bring a valid copy to `tier` for a visit, at a random time before it."""
        path = None if tier in self.copies else self._path(tuple(self.copies), tier)
        names = [v.name for v in self.plan.visits]
        at = self.plan.draw(self.plan.st.integers(self.last, visit - 1)) if path else visit
        after = names[at] if 0 <= at < visit else None
        for lane in path or ():
            if lane.target in self.copies:
                continue
            last = lane.target == tier
            after = self._move(lane, after, at, names[visit] if last else None)

    def leave(self, tier: str, back_to: str | None, needed: bool) -> None:
        """At random, evict the copy that was just used, if no needed value is lost."""
        plan, tensor = self.plan, self.tensor
        kept = needed or plan.problem.must_survive(tensor.id)
        dies = tensor.kind in SELF_ENDING_KINDS and not needed
        if dies or tensor.pinned or tier not in self.copies or not plan.chance():
            return
        now = plan.visits[self.last].name
        if not kept or len(self.copies) > 1:
            others = [t for t in self.copies if t != tier]
            if not kept or back_to in (None, *others) or self._path(others, str(back_to)):
                self._drop(tier, now)
            return
        exits = [
            lane
            for lane in plan.machine.lanes
            if lane.source == tier
            and (back_to in (None, lane.target) or self._path((lane.target,), str(back_to)))
        ]
        if exits:
            lane = plan.draw(plan.st.sampled_from(exits))
            codecs = [c for c in tensor.ratios if c in plan.machine.codec]
            coded = self.may_code and tier == DEVICE
            codec = plan.draw(plan.st.sampled_from([None, *codecs])) if coded else None
            self._drop(tier, self._move(lane, now, self.last, None, codec))

    def return_to(self, start: dict[str, str | None], first: str | None) -> None:
        """Restore the tiers at the start of a steady step; moves may wrap around its end."""
        after = self.plan.visits[self.last].name if self.last >= 0 else None
        for tier in start:
            for lane in () if tier in self.copies else self._path(tuple(self.copies), tier) or ():
                if lane.target not in self.copies:
                    wraps = lane.target == tier and self.plan.chance()
                    before = first if wraps else None
                    after = self._move(lane, after, self.last, before, wraps=wraps)
        for tier in [t for t in self.copies if t not in start]:
            self._drop(tier, after)
