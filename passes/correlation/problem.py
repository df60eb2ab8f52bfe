"""Converts a recorded trace into a problem with one op per run, so that any policy can plan it."""

from __future__ import annotations

from offcompile.ir import HOST, Op, Problem, Tensor
from offcompile.ir.trace import Trace


def problem_of(trace: Trace) -> Problem:
    """Converts the trace into one long step that does not repeat.

    Blocks that are read before they are written start on the host and outlive the trace; the others
    are created in it, and each of their values ends with its last reader.
    """
    used = {b for run in trace.runs for b in run.touched}
    tensors = tuple(
        Tensor(b.id, b.nbytes, "weight", HOST)
        if b.id in trace.given
        else Tensor(b.id, b.nbytes, "activation")
        for b in trace.blocks
        if b.id in used
    )
    ops = tuple(
        Op(
            f"{i}:{run.graph}" + ("" if run.binding is None else f"@{run.binding}"),
            "forward",
            run.duration_us,
            tuple(dict.fromkeys(run.reads)),
            tuple(dict.fromkeys(run.writes)),
        )
        for i, run in enumerate(trace.runs)
    )
    return Problem(tensors, ops)
