"""Computes the memory in use on each tier over a plan's timeline, by kind of tensor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from offcompile.ir import COMPUTE, DEVICE, HOST, HOST_COMPUTE, Move, Plan, Problem, Span, Timeline
from offcompile.ir.units import compressed_bytes

#: the kind of an op's workspace, in addition to the kinds of tensors
WORKSPACE = "workspace"


@dataclass(frozen=True)
class Change:
    """A tier's bytes of one kind grow by `nbytes` (shrink, if negative) at `time_ns`."""

    time_ns: int
    kind: str
    nbytes: int


def occupancy(problem: Problem, plan: Plan, timeline: Timeline) -> Mapping[str, tuple[Change, ...]]:
    """Tier → its changes in the order in which they happen, from the start of the first step.

    Simultaneous changes are in order too, so the maximum of the running sum is the timeline's peak.
    The timeline must be a recorded one, which lists the copies that were freed.
    """
    holder = _Holder(problem, plan, {tier: [] for tier in timeline.peak_bytes})
    holder.run(timeline)
    return {tier: tuple(changes) for tier, changes in holder.changes.items()}


def peak_bytes(changes: Iterable[Change]) -> int:
    """The peak of the running sum of changes."""
    held = peak = 0
    for change in changes:
        held += change.nbytes
        peak = max(peak, held)
    return peak


class _Holder:
    """Walks a timeline from start to end and records the changes."""

    def __init__(self, problem: Problem, plan: Plan, changes: dict[str, list[Change]]) -> None:
        self.problem, self.plan, self.changes = problem, plan, changes
        self.size: dict[tuple[str, str], int] = {}
        #: (end, tier, bytes) of the workspaces in use
        self.working: list[tuple[int, str, int]] = []
        self.moves = {move.id: move for move in plan.moves}
        self.again = {run.id: run.op for run in plan.recomputes}
        self.directs = {(direct.op, direct.tensor) for direct in plan.directs}

    def run(self, timeline: Timeline) -> None:
        for tensor, tier, nbytes in self._start():
            self._hold(0, tensor, tier, nbytes)
        freed = iter(timeline.freed)
        free = next(freed, None)
        for i in range(len(timeline.spans) + 1):
            # workspaces that end and tensors that are freed before the next span starts
            while free is not None and free.started <= i:
                self._end_work(free.time_ns)
                self._hold(free.time_ns, free.tensor, free.tier, 0)
                free = next(freed, None)
            if i < len(timeline.spans):
                span = timeline.spans[i]
                self._end_work(span.start_ns)
                self._begin(span)
        self._end_work(None)

    def _start(self) -> Iterator[tuple[str, str, int]]:
        """Yields the bytes held at the start; tensors left by a compressed move are compressed."""
        left_by = {(m.tensor, m.target): m for m in self.plan.moves if self.problem.steady}
        for start in self.plan.start:
            nbytes = self.problem.tensor[start.tensor].nbytes
            move = left_by.get((start.tensor, start.tier))
            if move is not None:
                nbytes = self._carried(move)
            yield start.tensor, start.tier, nbytes

    def _begin(self, span: Span) -> None:
        if span.lane not in (COMPUTE, HOST_COMPUTE):
            move = self.moves[span.id]
            self._hold(span.start_ns, move.tensor, move.target, self._carried(move))
            return
        op = self.problem.op[self.again.get(span.id, span.id)]
        on = HOST if span.lane == HOST_COMPUTE else DEVICE
        for tensor in op.writes:
            tier = HOST if (op.id, tensor) in self.directs else on
            self._hold(span.start_ns, tensor, tier, self.problem.tensor[tensor].nbytes)
        if op.workspace_bytes:
            self._change(span.start_ns, on, WORKSPACE, op.workspace_bytes)
            heappush(self.working, (span.end_ns, on, op.workspace_bytes))

    def _carried(self, move: Move) -> int:
        tensor = self.problem.tensor[move.tensor]
        if move.codec is None or move.target == DEVICE:
            return tensor.nbytes
        return compressed_bytes(tensor.nbytes, tensor.ratios[move.codec])

    def _end_work(self, until_ns: int | None) -> None:
        while self.working and (until_ns is None or self.working[0][0] <= until_ns):
            end_ns, tier, nbytes = heappop(self.working)
            self._change(end_ns, tier, WORKSPACE, -nbytes)

    def _hold(self, time_ns: int, tensor: str, tier: str, nbytes: int) -> None:
        more = nbytes - self.size.get((tensor, tier), 0)
        self.size[tensor, tier] = nbytes
        if more:
            self._change(time_ns, tier, self.problem.tensor[tensor].kind, more)

    def _change(self, time_ns: int, tier: str, kind: str, nbytes: int) -> None:
        self.changes[tier].append(Change(time_ns, kind, nbytes))
