"""How much the device must hold at each run if nothing is ever late: what decisions cost."""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.ir import DEVICE, Machine, Problem

from .decisions import Decisions
from .program import Program, span
from .residency import Residency, plan_residency


@dataclass(frozen=True)
class Pressure:
    """`kept_bytes` holds, run by run, operands, outputs, workspace and what stays beside them."""

    program: Program
    residency: Residency
    kept_bytes: tuple[int, ...]

    def excess(self, machine: Machine) -> list[int]:
        """Bytes over the device's budget at each run (below 0: room)."""
        capacity = machine.tier[DEVICE].capacity_bytes
        limit = max(self.kept_bytes, default=0) if capacity is None else capacity
        return [x - limit for x in self.kept_bytes]


def pressure(problem: Problem, decisions: Decisions) -> Pressure:
    program = Program(problem, decisions)
    residency = plan_residency(program, decisions)
    kept = list(program.op_bytes)
    for tensor, first, last in residency.held:
        for at in span(first, last, len(kept)):
            kept[at] += tensor.nbytes
    return Pressure(program, residency, tuple(kept))
