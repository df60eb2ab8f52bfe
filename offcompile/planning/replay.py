"""Peak memory of an order, computed from its steps alone, at sizes it was not made for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from offcompile.ir import DEVICE, Plan, Problem

from .order import ProgramStep, RunStep, StartStep


@dataclass
class _Stay:
    """One uninterrupted stretch of a tensor on the device, by positions in the order."""

    begin: int
    last: int
    moves: set[str] = field(default_factory=set)


def worst_case(problem: Problem, plan: Plan, steps: Sequence[ProgramStep]) -> int:
    """The peak of device bytes, assuming that every copy out takes until it is waited for.

    `problem` must have the ops that the order was made for, but may have other sizes.
    """
    moves = {m.id: m for m in plan.moves}
    directs = {(d.op, d.tensor) for d in plan.directs}
    leaving = {d.tensor for d in plan.drops if d.tier == DEVICE}
    waited = {s.move: i for i, s in enumerate(steps) if not isinstance(s, RunStep | StartStep)}
    stays: dict[str, list[_Stay]] = {
        t.id: [_Stay(0, 0)] for t in problem.tensors if t.home == DEVICE
    }
    for i, step in enumerate(steps):
        if isinstance(step, RunStep):
            op = problem.op[step.name.partition("@")[0]]
            here = [t for t in op.operands if (op.id, t) not in directs]
            for t in here:
                if t in op.writes and t not in op.reads and problem.tensor[t].home is None:
                    stays.setdefault(t, []).append(_Stay(i, i))
                stays[t][-1].last = i
        elif isinstance(step, StartStep):
            move = moves[step.move]
            if move.target == DEVICE:
                stays.setdefault(move.tensor, []).append(_Stay(i, i))
            elif move.source == DEVICE:
                stays[move.tensor][-1].moves.add(move.id)
    change = [0] * (len(steps) + 2)
    for t, several in stays.items():
        tensor = problem.tensor[t]
        for stay in several:
            end = max([stay.last, *(waited.get(m, len(steps)) for m in stay.moves)])
            if t not in leaving and (problem.must_survive(t) or tensor.home == DEVICE):
                end = len(steps)
            change[stay.begin] += tensor.nbytes
            change[end + 1] -= tensor.nbytes
    held = most = 0
    for i, step in enumerate(steps):
        held += change[i]
        own = 0
        if isinstance(step, RunStep):
            own = problem.op[step.name.partition("@")[0]].workspace_bytes
        most = max(most, held + own)
    return most
