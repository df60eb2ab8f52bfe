"""Device memory needed at each run under given decisions, if nothing is ever late."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from offcompile.ir import DEVICE, Machine, Problem
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.program import Program
from offcompile.passes.build.required_copies import Residency, plan_residency


@dataclass(frozen=True)
class Pressure:
    """`kept_bytes` per run: operands, outputs, workspace and the tensors kept alongside."""

    program: Program
    residency: Residency
    kept_bytes: tuple[int, ...]

    def excess(self, machine: Machine) -> list[int]:
        """Returns the bytes over the device's budget at each run (negative: free)."""
        capacity = machine.tier[DEVICE].capacity_bytes
        limit = max(self.kept_bytes, default=0) if capacity is None else capacity
        return [x - limit for x in self.kept_bytes]


def pressure(problem: Problem, decisions: Decisions) -> Pressure:
    program = Program.of(problem, decisions)
    residency = plan_residency(program, decisions)
    change = [0] * (len(program.runs) + 1)
    for tensor, first, last in residency.held:
        change[first + 1] += tensor.nbytes
        change[last] -= tensor.nbytes
        if last <= first:  # around the end of the step
            change[0] += tensor.nbytes
    beside = accumulate(change[:-1])
    kept = tuple(own + more for own, more in zip(program.op_bytes, beside, strict=True))
    return Pressure(program, residency, kept)
