"""Solves linear programs with HiGHS, some of whose columns may have to be integers.

HiGHS comes with highspy. SciPy has it, too, and stands in where only SciPy is installed. (SciPy's
own way to HiGHS is not taken: importing it takes a quarter of a second and 28 MiB.)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

#: modules that have HiGHS, by preference
_HOMES = ("highspy._core", "scipy.optimize._highspy._core")


def load() -> Any:
    """Import HiGHS. ImportError if neither package is there."""
    for name in _HOMES:
        try:
            return importlib.import_module(name)
        except ImportError:
            continue
    raise ImportError("planning needs HiGHS: pip install highspy (or scipy>=1.15)")


# now, since searches count their time
highs: Any = load()


@dataclass(frozen=True, eq=False)
class Matrix:
    """A sparse matrix by its entries. Those at the same place add up."""

    rows: Ints
    columns: Ints
    values: Floats
    shape: tuple[int, int]

    @classmethod
    def of(
        cls,
        rows: Sequence[int] | Ints,
        columns: Sequence[int] | Ints,
        values: Sequence[float] | Floats,
        shape: tuple[int, int],
    ) -> Matrix:
        down, across = np.asarray(rows, dtype=np.int64), np.asarray(columns, dtype=np.int64)
        return cls(down, across, np.asarray(values, dtype=np.float64), shape)

    @classmethod
    def dense(cls, rows: Sequence[Sequence[float]], width: int) -> Matrix:
        values = np.array(rows, dtype=np.float64).reshape(-1, width)
        down, across = np.nonzero(values)
        return cls(down, across, values[down, across], (len(values), width))

    def above(self, other: Matrix) -> Matrix:
        """Put the rows of another matrix below these."""
        return Matrix(
            np.concatenate([self.rows, other.rows + self.shape[0]]),
            np.concatenate([self.columns, other.columns]),
            np.concatenate([self.values, other.values]),
            (self.shape[0] + other.shape[0], self.shape[1]),
        )

    def transposed_times(self, y: Floats) -> Floats:
        """The transposed matrix times a column."""
        return _sums(self.columns, self.values * y[self.rows], self.shape[1])

    def by_columns(self) -> tuple[Ints, Ints, Floats]:
        """Where each column begins, and the row and value of each entry, column by column."""
        height, width = self.shape
        places, where = np.unique(self.columns * max(1, height) + self.rows, return_inverse=True)
        columns, rows = places // max(1, height), places % max(1, height)
        begins = np.searchsorted(columns, np.arange(width + 1))
        return begins, rows, _sums(where, self.values, len(places))


def _sums(places: Ints, values: Floats, count: int) -> Floats:
    return np.bincount(places, values, count).astype(np.float64, copy=False)


class Outcome(Enum):
    BEST = auto()
    INFEASIBLE = auto()
    TOO_LATE = auto()
    FAILED = auto()


@dataclass(frozen=True, eq=False)
class Solution:
    outcome: Outcome
    #: the best columns, or with integers the best that were found; None: there are none
    x: Floats | None = None
    #: the change of the goal with the side of each row; None: with integers, or not `BEST`
    row_duals: Floats | None = None
    #: with integers: no columns are better
    bound: float | None = None


@dataclass(frozen=True, eq=False)
class Constraints:
    """Rows `A x ≤ limit`, or `= limit`."""

    matrix: Matrix
    limits: Floats | Sequence[float]


def solve(
    cost: Floats | Sequence[float],
    limits: Constraints,
    equal: Constraints | None = None,
    *,
    least: Floats | None = None,
    most: Floats | Sequence[float] | None = None,
    whole: Sequence[bool] | npt.NDArray[np.bool_] = (),
    **options: float,
) -> Solution:
    """Find columns with the least cost. Duals are those of `limits`, then those of `equal`.

    least, most: of each column; 0 and without limit by default. whole: the columns that have to be
    integers. options: of HiGHS, such as `time_limit` in seconds. RuntimeError if it refuses them.
    """
    matrix = limits.matrix if equal is None else limits.matrix.above(equal.matrix)
    fixed = np.asarray([] if equal is None else equal.limits, dtype=np.float64)
    height, width = matrix.shape
    program = highs.HighsLp()
    program.num_row_, program.num_col_ = height, width
    program.col_cost_ = np.asarray(cost, dtype=np.float64)
    program.col_lower_ = np.zeros(width) if least is None else least
    program.col_upper_ = np.full(width, np.inf) if most is None else np.asarray(most, dtype=float)
    program.row_upper_ = np.concatenate([np.asarray(limits.limits, dtype=np.float64), fixed])
    program.row_lower_ = np.concatenate([np.full(height - len(fixed), -np.inf), fixed])
    inner = program.a_matrix_
    inner.num_row_, inner.num_col_ = height, width
    inner.format_ = highs.MatrixFormat.kColwise
    inner.start_, inner.index_, inner.value_ = matrix.by_columns()
    has_integers = bool(np.any(whole))
    if has_integers:
        kinds = highs.HighsVarType
        program.integrality_ = [kinds.kInteger if w else kinds.kContinuous for w in whole]
    return _run(program, options, has_integers)


def _run(program: Any, options: dict[str, float], has_integers: bool) -> Solution:
    solver, chosen = highs._Highs(), highs.HighsOptions()
    chosen.output_flag = chosen.log_to_console = False
    chosen.presolve = "on"
    for name, value in options.items():
        setattr(chosen, name, value)
    error = highs.HighsStatus.kError
    if error in (solver.passOptions(chosen), solver.passModel(program)):
        raise RuntimeError("HiGHS refuses the program or its options")
    if solver.run() == error:
        return Solution(Outcome.FAILED)
    status, known = solver.getModelStatus(), highs.HighsModelStatus
    outcome = {
        known.kOptimal: Outcome.BEST,
        known.kInfeasible: Outcome.INFEASIBLE,
        known.kTimeLimit: Outcome.TOO_LATE,
    }.get(status, Outcome.FAILED)
    info, found = solver.getInfo(), solver.getSolution()
    if has_integers:
        is_found = outcome in (Outcome.BEST, Outcome.TOO_LATE)
        is_found &= bool(np.isfinite(info.objective_function_value))
        x = np.array(found.col_value) if is_found else None
        return Solution(outcome, x, None, float(info.mip_dual_bound))
    if outcome is not Outcome.BEST:
        return Solution(outcome)
    return Solution(outcome, np.array(found.col_value), np.array(found.row_dual))
