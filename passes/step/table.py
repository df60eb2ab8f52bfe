"""The step table: for each execution, which saved tensors go and which come back behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from offcompile.ir import DEVICE, Move, Plan

from .record import RecordedStep, TensorKey
from .stitch import StitchedStep, op_id, tensor_id


@dataclass(frozen=True)
class StepTable:
    """Tells a cache what to do with the tensors of a step. Those not named stay.

    `outs`: by position of an execution, the tensors that leave once it is over (those that it
    saves itself: at once). `ins`: the tensors whose loads may begin then, in this order.
    """

    step: RecordedStep
    outs: Mapping[int, tuple[TensorKey, ...]]
    ins: Mapping[int, tuple[TensorKey, ...]]

    @cached_property
    def leaving_at_once(self) -> frozenset[TensorKey]:
        """Tensors that leave as soon as they are made."""
        return frozenset(k for at, keys in self.outs.items() for k in keys if k.born == at)

    @cached_property
    def moved_bytes(self) -> int:
        return sum(self.step.nbytes(key) for keys in self.outs.values() for key in keys)


def table_of(stitched: StitchedStep, plan: Plan) -> StepTable:
    """Read a plan of the stitched problem as a table."""
    step = stitched.step
    keys = {tensor_id(step, key): key for key in step.wanted}
    positions = {op_id(step, p): p for p in range(len(step.executions))}
    moves = {move.id: move for move in plan.moves}

    def after(move: Move) -> int:
        """The last execution that a move waits for, directly or through other moves."""
        seen: set[str] = set()
        trigger = move.start_after
        while trigger in moves and trigger not in seen:
            seen.add(trigger)
            trigger = moves[trigger].start_after
        return max(keys[move.tensor].born, positions.get(trigger or "", 0))

    outs: dict[int, list[TensorKey]] = {}
    ins: dict[int, list[TensorKey]] = {}
    for move in plan.moves:
        where = outs if move.source == DEVICE else ins if move.target == DEVICE else None
        if where is not None:
            where.setdefault(after(move), []).append(keys[move.tensor])
    return StepTable(
        step,
        {at: tuple(found) for at, found in outs.items()},
        {at: tuple(found) for at, found in ins.items()},
    )
