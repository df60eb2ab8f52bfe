"""Stitches the executions of a recorded step into one problem, so that any policy can plan it.

    F0 F1 … Fn Bn … B1 B0 optimizer

Each execution is an op that takes as long as it was measured to take. Its workspace is everything
that it holds beside the tensors that travel between graphs (weights, gradients, its own plan, the
memory of optimizers): the device's capacity less the room that it was seen to leave. The tensors
that graphs save for each other are activations with their sizes, written by one op and read by
others.
"""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.ir import BACKWARD, FORWARD, Op, Problem, Tensor

from .record import RecordedStep, TensorKey

OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class StitchedStep:
    """A step as a problem, and the device memory that it is to be planned for."""

    step: RecordedStep
    problem: Problem
    capacity_bytes: int


def op_id(step: RecordedStep, position: int) -> str:
    return f"{'B' if step.executions[position].backward else 'F'}{position}"


def tensor_id(step: RecordedStep, key: TensorKey) -> str:
    return f"{key.born}.{key.number} {step.executions[key.born].saved[key.number][0]}"


def stitch(step: RecordedStep) -> StitchedStep:
    """Stitch a step. A tensor that no execution reads again is left out: it never comes back."""
    positions = range(len(step.executions))
    own = [step.own_bytes(p) for p in positions]
    rooms = [max(0, m.room_bytes) for m in step.measured]
    capacity = max((room + mine for room, mine in zip(rooms, own, strict=True)), default=0)
    wanted = step.wanted
    tensors, ops = [], []
    for p in positions:
        run = step.executions[p]
        made = [key for n in range(len(run.saved)) if (key := TensorKey(p, n)) in wanted]
        tensors += [Tensor(tensor_id(step, key), step.nbytes(key), "activation") for key in made]
        # tensors that no op reads again leave with the run that saved them
        counted = sum(map(step.nbytes, (*made, *run.read))) if run.counts_own else 0
        ops.append(
            Op(
                op_id(step, p),
                BACKWARD if run.backward else FORWARD,
                step.measured[p].duration_us,
                tuple(tensor_id(step, key) for key in run.read),
                tuple(tensor_id(step, key) for key in made),
                workspace_bytes=max(0, capacity - rooms[p] - counted),
            )
        )
    ops.append(Op(OPTIMIZER, BACKWARD, step.after_us))
    return StitchedStep(step, Problem(tuple(tensors), tuple(ops)), capacity)
