"""The relaxation: a linear program that every valid plan satisfies, per slot of the step.

It follows the lower bound of "Weight Offloading Strategies" §6 (Theorem 2), extended from weights
to everything that contract §2 allows. A valid plan maps to the program as follows.

- A tensor in a gap between two accesses either *stays* on the device throughout, or leaves:
  `not_gone` is then the part that has not left yet, `load` the part that its last load brought
  back, `redone` the part that a recomputation brought back. All of them take memory.
- `held` per tier is the part of the current value that has been carried there since it was
  written; it starts at 0 if the device writes the tensor, at 1 if the host does. Nothing
  leaves before it is held.
- A slot is at least as long as its ops take, and as its transfers take on each lane; the output
  of an op can be carried only in the rest of the slot after the op (eq. (3) of the paper).

Plans are integral where the program is fractional, and reserve space before the bytes arrive:
the program is a relaxation. With integral `stays` it is the MILP.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offcompile.bounds.survey import Survey

from .grid import Grid
from .matrix import LinearProgram
from .residence import Residence
from .stay import GapColumns
from .times import Times


@dataclass(frozen=True)
class BoundModel:
    program: LinearProgram
    unit_ns: float  # one unit of time of the program
    most_ns: float  # the bound is capped here: longer makespans are not considered
    stays: tuple[GapColumns, ...]


def build(survey: Survey, grid: Grid, whole: bool = False) -> BoundModel:
    """The program of one grid. `whole`: in the MILP, space is integral too (expensive)."""
    times = Times(survey, grid)
    crowded = np.flatnonzero(survey.crowded[grid.samples // 2])
    memory = np.full(len(grid.samples), -1)
    memory[crowded] = times.rows.reserve(len(crowded), 1.0)
    limits = {
        tier: (capacity, times.rows.reserve(len(grid.samples), 1.0))
        for tier in survey.tiers
        if (capacity := survey.machine.tier[tier].capacity_bytes) is not None
    }
    residence = Residence(times, memory, limits, whole)
    for gaps in survey.gaps.values():
        residence.add(gaps)
    for sample in crowded:
        _operands(residence, int(sample))
    times.close()
    program = times.rows.program(times.cols)
    return BoundModel(program, times.unit, times.most_ns, tuple(residence.made))


def _operands(r: Residence, sample: int) -> None:
    """Adds the memory that an op holds on the device until it ends: operands and workspace."""
    s, t = r.s, r.t
    op, row = int(r.grid.samples[sample]) // 2, int(r.memory[sample])
    workspace = s.problem.ops[op].workspace_bytes
    r.fix(sample, workspace)
    if op in t.on_host:
        r.rows.put(row, t.on_host[op], -r.share(workspace))
    for tensor in s.problem.ops[op].operands:
        nbytes = s.problem.tensor[tensor].nbytes
        r.fix(sample, nbytes)
        for column in t.absent(op, tensor):
            r.rows.put(row, column, -r.share(nbytes))
