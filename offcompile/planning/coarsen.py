"""Merges neighbouring ops that no decision could part, so fewer and larger ops are planned.

Two neighbouring ops become one if no movable tensor is born, first read, last read or written
between them: then no move, drop or write could have any effect at that point. Pinned tensors do
not move, so they seldom prevent a merge. Short-lived tensors that live within a merged op become
part of its workspace, which is the peak of the ops inside. A plan for the coarse problem names
only ends of merged ops, and becomes a plan for the fine problem by renaming.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offcompile.ir import DEVICE, SELF_ENDING_KINDS, Drop, Move, Op, Plan, Problem, Recompute
from offcompile.ir.units import round_ns


@dataclass(frozen=True)
class Coarse:
    """A coarse problem, and the fine ops that each of its ops stands for."""

    problem: Problem
    groups: dict[str, tuple[str, ...]]

    @staticmethod
    def same(problem: Problem) -> Coarse:
        """The problem without any merges."""
        return Coarse(problem, {op.id: (op.id,) for op in problem.ops})

    def reruns(self, plan: Plan) -> frozenset[tuple[str, str]]:
        """Recomputations of a plan for the fine problem, as (op, before) of the coarse one. Leaves
        out ops that this problem does not have."""
        group_of = {op: name for name, ops in self.groups.items() for op in ops}
        found = {
            (r.op, group_of[r.before])
            for r in plan.recomputes
            if r.op in group_of and r.before in group_of
        }
        return frozenset(
            (group_of[op], before)
            for op, before in found
            if all((other, before) in found for other in self.groups[group_of[op]])
        )

    def expand(self, plan: Plan) -> Plan:
        """Converts the plan to the fine problem."""
        last = {name: ops[-1] for name, ops in self.groups.items()}
        first = {name: ops[0] for name, ops in self.groups.items()}
        for r in plan.recomputes:
            before = first[r.before]
            first[r.id] = f"{self.groups[r.op][0]}@{before}"
            last[r.id] = f"{self.groups[r.op][-1]}@{before}"

        def after(name: str | None) -> str | None:
            return None if name is None else last.get(name, name)

        moves = tuple(
            Move(
                m.id,
                m.tensor,
                m.source,
                m.target,
                m.lane,
                after(m.start_after),
                None if m.ready_before is None else first[m.ready_before],
                m.wraps,
                m.codec,
            )
            for m in plan.moves
        )
        return Plan(
            start=plan.start,
            moves=moves,
            drops=tuple(Drop(d.tensor, d.tier, after(d.after)) for d in plan.drops),
            directs=plan.directs,
            recomputes=tuple(
                Recompute(op, first[r.before]) for r in plan.recomputes for op in self.groups[r.op]
            ),
            updates=plan.updates,
        )


def coarsen(problem: Problem) -> Coarse:
    """Merges all ops that can be merged without changing the choices."""
    fixed = _fixed(problem)
    movable = _movable(problem) - fixed
    last_use: dict[str, int] = {}
    # tensors fixed from the start exist before the first op, and stay after the last
    first_use = {t: -1 for t in fixed if problem.steady or problem.tensor[t].home is not None}
    for i, op in enumerate(problem.ops):
        for t in op.operands:
            first_use.setdefault(t, i)
            last_use[t] = i
    last_use |= {t: len(problem.ops) for t in fixed if problem.stays_put(t)}
    groups: list[list[int]] = []
    for i, op in enumerate(problem.ops):
        if groups and _joins(problem, problem.ops[groups[-1][-1]], op, movable):
            trial = [*groups[-1], i]
            if _workspace(problem, trial, movable, first_use, last_use) >= 0:
                groups[-1] = trial
                continue
        groups.append([i])
    ops, names, gone = [], {}, set()
    for group in groups:
        merged, inner = _merge(problem, group, movable, first_use, last_use)
        ops.append(merged)
        names[merged.id] = tuple(problem.ops[i].id for i in group)
        gone |= inner
    tensors = tuple(t for t in problem.tensors if t.id not in gone)
    return Coarse(Problem(tensors, tuple(ops), problem.steady), names)


def _movable(problem: Problem) -> set[str]:
    """Tensors that a plan could evict: all that last, and those idle between two uses."""
    movable = {t.id for t in problem.tensors if t.kind not in SELF_ENDING_KINDS or t.home}
    last: dict[str, int] = {}
    written: set[str] = set()
    for i, op in enumerate(problem.ops):
        for t in op.operands:
            if t in last and last[t] < i - 1:
                movable.add(t)
            if t not in last and t in op.reads:
                movable.add(t)  # read before it is written: its value comes from the previous step
            if t in op.writes and t in written:
                movable.add(t)  # several values: keep the ops that write them apart
            last[t] = i
        written.update(op.writes)
    return movable


def _fixed(problem: Problem) -> set[str]:
    """Pinned tensors about which there is nothing to decide: merging ops hides no choice.

    These stay to the end, or die by themselves after their only value, unless an op may recompute
    it. Excludes tensors that a host update may touch, for which the order of ops matters.
    """
    hosted = {t for o in problem.ops if o.host_duration_us is not None for t in o.operands}
    again = {t for o in problem.ops if o.recompute for t in o.writes}
    written: set[str] = set()
    several: set[str] = set()
    early: set[str] = set()
    for op in problem.ops:
        several |= written.intersection(op.writes)
        early |= set(op.reads) - written
        written.update(op.writes)
    one_value = {t.id for t in problem.tensors if t.home is None} - several - early - again
    return {
        t.id
        for t in problem.tensors
        if t.pinned
        and t.id not in hosted
        and t.home in (None, DEVICE)
        and (problem.stays_put(t.id) or t.id in one_value)
    }


def _joins(problem: Problem, a: Op, b: Op, movable: set[str]) -> bool:
    """True if nothing can happen between two neighbouring ops."""
    if a.phase != b.phase or a.recompute != b.recompute:
        return False
    if a.direct or b.direct or a.host_duration_us is not None or b.host_duration_us is not None:
        return False
    mine, theirs = movable.intersection(a.operands), movable.intersection(b.operands)
    return mine == theirs and not mine.intersection(a.writes + b.writes)


def _held(
    problem: Problem,
    group: Sequence[int],
    movable: set[str],
    first_use: dict[str, int],
    last_use: dict[str, int],
) -> tuple[int, set[str], set[str]]:
    """(peak of short-lived bytes and workspace inside, inner tensors, short-lived that cross)."""
    low, high = group[0], group[-1]
    short = {t for i in group for t in problem.ops[i].operands if t not in movable}
    inner = {t for t in short if first_use[t] >= low and last_use[t] <= high}
    peak = 0
    for i in group:
        live = sum(problem.tensor[t].nbytes for t in short if first_use[t] <= i <= last_use[t])
        peak = max(peak, live + problem.ops[i].workspace_bytes)
    return peak, inner, short - inner


def _workspace(
    problem: Problem,
    group: Sequence[int],
    movable: set[str],
    first_use: dict[str, int],
    last_use: dict[str, int],
) -> int:
    """Workspace of the merged op; below 0 if the merged op would hold more than its parts."""
    peak, _, crossing = _held(problem, group, movable, first_use, last_use)
    return peak - sum(problem.tensor[t].nbytes for t in crossing)


def _merge(
    problem: Problem,
    group: Sequence[int],
    movable: set[str],
    first_use: dict[str, int],
    last_use: dict[str, int],
) -> tuple[Op, set[str]]:
    ops = [problem.ops[i] for i in group]
    if len(ops) == 1:
        return ops[0], set()
    _, inner, _ = _held(problem, group, movable, first_use, last_use)
    written: set[str] = set()
    reads: dict[str, None] = {}
    for op in ops:
        reads.update(dict.fromkeys(t for t in op.reads if t not in inner and t not in written))
        written.update(op.writes)
    writes = dict.fromkeys(t for op in ops for t in op.writes if t not in inner)
    merged = Op(
        id=ops[0].id,
        phase=ops[0].phase,
        duration_us=sum(round_ns(op.duration_us) for op in ops) / 1000,
        reads=tuple(reads),
        writes=tuple(writes),
        workspace_bytes=_workspace(problem, group, movable, first_use, last_use),
        recompute=ops[0].recompute,
    )
    return merged, inner
