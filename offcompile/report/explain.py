"""Explains the treatment of every tensor under a plan, with the figures behind it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from offcompile.ir import DEVICE, Machine, Move, Plan, Problem, Span, Tensor, Timeline
from offcompile.ir.units import move_ns, show_us, size
from offcompile.planning.timelines import (
    NS_PER_US,
    duration_us,
    moved_bytes,
    settled_spans,
    since_step_us,
    step_start_ns,
    total_us,
)

STAYS, MOVES, RECOMPUTED, DIRECT, ELSEWHERE = (
    "stays on the device",
    "moves",
    "is computed again",
    "is accessed in place on the host",
    "never comes to the device",
)


@dataclass(frozen=True)
class Fate:
    """One tensor under the plan: its treatment, and the cost of that in one step."""

    tensor: Tensor
    modes: tuple[str, ...]
    #: time for which ops wait for its moves
    waiting_us: float
    #: compute time added by recomputing it or by accessing it in place
    compute_us: float
    #: time for which its moves occupy their lanes
    lane_us: float
    #: its moves, recomputations and in-place accesses, in order of time
    events: tuple[str, ...]
    reasons: tuple[str, ...]

    @property
    def cost_us(self) -> float:
        """The time that the treatment adds to the step."""
        return self.waiting_us + self.compute_us


@dataclass(frozen=True)
class Rest:
    """The longest time within the step in which no op touches a tensor."""

    duration_us: float
    after: str
    before: str


def fates(problem: Problem, machine: Machine, plan: Plan, timeline: Timeline) -> tuple[Fate, ...]:
    """The fate of every tensor, sorted by cost, then by time on lanes and by size, descending."""
    teller = _Teller(problem, machine, plan, timeline)
    return tuple(
        sorted(
            (teller.fate(tensor) for tensor in problem.tensors),
            key=lambda f: (-f.cost_us, -f.lane_us, -f.tensor.nbytes, f.tensor.id),
        )
    )


def print_fate(fate: Fate, label: str = "") -> str:
    tensor = fate.tensor
    about = ", ".join(filter(None, (label, tensor.kind, size(tensor.nbytes))))
    head = f"{tensor.id} ({about}): {' and '.join(fate.modes)}"
    return "\n".join(
        (head, *(f"  {event}" for event in fate.events), *(f"  why: {r}" for r in fate.reasons))
    )


@dataclass(frozen=True)
class _Teller:
    problem: Problem
    machine: Machine
    plan: Plan
    timeline: Timeline

    # --- lookups ----------------------------------------------------------------------------

    @cached_property
    def spans(self) -> Mapping[str, Span]:
        return settled_spans(self.timeline)

    @cached_property
    def moves(self) -> Mapping[str, list[Move]]:
        found: dict[str, list[Move]] = defaultdict(list)
        for move in self.plan.moves:
            found[move.tensor].append(move)
        return found

    @cached_property
    def uses(self) -> Mapping[str, list[str]]:
        found: dict[str, list[str]] = defaultdict(list)
        for op in self.problem.ops:
            for tensor in op.operands:
                found[tensor].append(op.id)
        return found

    @cached_property
    def makers(self) -> Mapping[str, str]:
        """Tensor → the first op that writes it."""
        found: dict[str, str] = {}
        for op in self.problem.ops:
            for tensor in op.writes:
                found.setdefault(tensor, op.id)
        return found

    @cached_property
    def standing(self) -> frozenset[str]:
        """Tensors that are on the device in the steady state."""
        return frozenset(s.tensor for s in self.plan.start if s.tier == DEVICE)

    @cached_property
    def in_place(self) -> Mapping[str, list[str]]:
        """Tensor → the ops that access it on the host."""
        found: dict[str, list[str]] = defaultdict(list)
        for direct in self.plan.directs:
            found[direct.tensor].append(direct.op)
        return found

    @cached_property
    def waits_us(self) -> Mapping[str, float]:
        """Move → its share of the waits that it contributes to."""
        known = {move.id for move in self.plan.moves}
        found: dict[str, float] = defaultdict(float)
        for stall in self.timeline.stalls:
            for move in (moves := [x for x in stall.waited_for if x in known]):
                found[move] += stall.duration_ns / NS_PER_US / len(moves)
        return found

    @cached_property
    def runs_again(self) -> Mapping[str, list[str]]:
        """Tensor → ids of the recomputations that produce it again."""
        found: dict[str, list[str]] = defaultdict(list)
        for again in self.plan.recomputes:
            for tensor in self.problem.op[again.op].writes:
                found[tensor].append(again.id)
        return found

    # --- one tensor -------------------------------------------------------------------------

    def fate(self, tensor: Tensor) -> Fate:
        moves = sorted(self.moves.get(tensor.id, []), key=self._begin_us)
        again = self.runs_again.get(tensor.id, [])
        direct = self.in_place.get(tensor.id, [])
        modes = tuple(
            mode for mode, holds in ((MOVES, moves), (RECOMPUTED, again), (DIRECT, direct)) if holds
        )
        return Fate(
            tensor,
            modes or (self._place(tensor),),
            sum(self.waits_us.get(m.id, 0.0) for m in moves),
            self._again_us(again) + sum(self._extra_us(op, tensor.id) for op in direct),
            total_us(self.spans[m.id] for m in moves if m.id in self.spans),
            (
                *(self._event(move) for move in moves),
                *(f"runs again: {run.replace('@', ' before ')}" for run in again),
                *(f"in place: {op} on the host" for op in direct),
            ),
            tuple(self._reasons(tensor, moves, again, direct)),
        )

    def _place(self, tensor: Tensor) -> str:
        on_device = tensor.home == DEVICE or tensor.id in self.makers
        return STAYS if on_device or tensor.id in self.standing else ELSEWHERE

    def _begin_us(self, move: Move) -> float:
        span = self.spans.get(move.id)
        return since_step_us(self.timeline, span) if span else 0.0

    def _event(self, move: Move) -> str:
        verb = (
            "returns" if move.target == DEVICE else "goes" if move.source == DEVICE else "goes on"
        )
        nbytes = moved_bytes(self.problem, move.tensor, move.codec)
        packed = f" as {move.codec}" if move.codec else ""
        told = f"{verb}: {move.source} → {move.target} on {move.lane}, {size(nbytes)}{packed}"
        if span := self.spans.get(move.id):
            begin_us = since_step_us(self.timeline, span)
            end_us = begin_us + duration_us(span)
            told += f", {show_us(begin_us)} to {show_us(end_us)}"
        told += f", after {move.start_after or 'the start'}"
        if move.ready_before or move.wraps:
            told += f", ready before {move.ready_before or 'the end'}"
        return told + (" of the next step" if move.wraps else "")

    # --- why --------------------------------------------------------------------------------

    def _reasons(
        self, tensor: Tensor, moves: list[Move], again: list[str], direct: list[str]
    ) -> Iterator[str]:
        rest = self._rest(tensor.id)
        idle = ""
        if rest is not None:
            idle = f"idle for {show_us(rest.duration_us)} from {rest.after} to {rest.before}"
        away_us = self._away_us(tensor)
        again_us = self._maker_us(tensor)
        if moves:
            held_us = total_us(self.spans[m.id] for m in moves if m.id in self.spans)
            waited_us = sum(self.waits_us.get(m.id, 0.0) for m in moves)
            waited = (
                f"ops wait {show_us(waited_us)} for them" if waited_us else "no op waits for them"
            )
            yield "; ".join(
                filter(None, (idle, f"its moves hold lanes for {show_us(held_us)}, {waited}"))
            )
            if again_us is not None and not again:
                yield f"computing it again would add {show_us(again_us)} of compute"
        if again:
            moving = ""
            if away_us is not None and not moves:
                moving = f"; moving it out and back would hold lanes for {show_us(away_us)}"
            lead = f"{idle}; " if idle and not moves else ""
            added = show_us(self._again_us(again))
            yield f"{lead}computing it again adds {added} of compute{moving}"
        for op in direct:
            yield f"{op} takes {show_us(self._extra_us(op, tensor.id))} more in place"
        if not (moves or again or direct) and idle:
            cost = "no lane leads away" if away_us is None else f"lanes held {show_us(away_us)}"
            told = "it may not move" if tensor.pinned else f"out and back: {cost}"
            yield f"{idle}; {told}"

    def _rest(self, tensor_id: str) -> Rest | None:
        used = [(op, self.spans[op]) for op in self.uses.get(tensor_id, []) if op in self.spans]
        rests = [
            Rest((later.start_ns - earlier.end_ns) / NS_PER_US, before, after)
            for (before, earlier), (after, later) in pairwise(used)
        ]
        if self.problem.steady and used and self.problem.tensor[tensor_id].kind in _KEPT_KINDS:
            begin_ns = step_start_ns(self.timeline)
            (first, start), (last, end) = used[0], used[-1]
            over_us = self.timeline.makespan_us - (end.end_ns - begin_ns) / NS_PER_US
            over_us += (start.start_ns - begin_ns) / NS_PER_US
            rests.append(Rest(over_us, last, f"{first} of the next step"))
        rest = max(rests, key=lambda r: r.duration_us, default=None)
        return rest if rest is not None and rest.duration_us > 0 else None

    def _away_us(self, tensor: Tensor) -> float | None:
        """The least lane time to evict and reload the tensor; None if no lanes connect."""
        ways = [
            sum(
                min(
                    move_ns(tensor.nbytes, lane.bytes_per_us, lane.latency_us) / NS_PER_US
                    for lane in lanes
                )
                for lanes in (out, back)
            )
            for tier in self.machine.tiers
            if (out := self.machine.lanes_between(DEVICE, tier.name))
            and (back := self.machine.lanes_between(tier.name, DEVICE))
        ]
        return min(ways, default=None)

    def _maker_us(self, tensor: Tensor) -> float | None:
        """The time to rerun the op that makes the tensor; None if it cannot be recomputed."""
        maker = self.makers.get(tensor.id)
        op = self.problem.op[maker] if maker is not None else None
        return op.duration_us if op is not None and op.recompute else None

    def _again_us(self, runs: list[str]) -> float:
        return total_us(self.spans[run] for run in runs if run in self.spans)

    def _extra_us(self, op_id: str, tensor_id: str) -> float:
        op = self.problem.op[op_id]
        return max(0.0, op.direct.get(tensor_id, op.duration_us) - op.duration_us)


_KEPT_KINDS = ("weight", "state")
