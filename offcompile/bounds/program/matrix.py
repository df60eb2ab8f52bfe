"""Columns and rows of a linear program `min c·x, A x ≤ b, lo ≤ x ≤ hi`, grown in blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offcompile.bounds.highs import Floats, Ints, Matrix


@dataclass(frozen=True)
class LinearProgram:
    """One LP, or MILP if any column is `integral`. Every column is bounded on both sides."""

    cost: Floats
    matrix: Matrix
    rhs: Floats
    lo: Floats
    hi: Floats
    integral: npt.NDArray[np.bool_]

    @property
    def n_columns(self) -> int:
        return len(self.cost)


class Columns:
    """Columns in the order of their addition; the first two are constants."""

    def __init__(self) -> None:
        self._count = 0
        self._blocks: list[tuple[int, float, float, float, bool]] = []
        self.zero, self.unity = self.one(0, 0), self.one(1, 1)

    def new(
        self, count: int, lo: float = 0.0, hi: float = 1.0, cost: float = 0.0, whole: bool = False
    ) -> Ints:
        """Adds `count` adjacent columns."""
        first = self._count
        self._count += count
        self._blocks.append((count, lo, hi, cost, whole))
        return np.arange(first, self._count)

    def one(self, lo: float = 0.0, hi: float = 1.0, cost: float = 0.0, whole: bool = False) -> int:
        return int(self.new(1, lo, hi, cost, whole)[0])

    def arrays(self) -> tuple[Floats, Floats, Floats, npt.NDArray[np.bool_]]:
        """lo, hi, cost, whole."""
        counts = np.array([b[0] for b in self._blocks])
        lo, hi, cost = (
            np.repeat(np.array([b[k] for b in self._blocks], dtype=float), counts)
            for k in (1, 2, 3)
        )
        whole = np.repeat(np.array([b[4] for b in self._blocks], dtype=np.bool_), counts)
        return lo, hi, cost, whole


class MatrixRows:
    """Rows `Σ coefficient · column ≤ rhs`; entries at the same place add up."""

    def __init__(self) -> None:
        self.rhs: list[float] = []
        self._rows: list[Ints] = []
        self._cols: list[Ints] = []
        self._values: list[Floats] = []

    def reserve(self, count: int, rhs: float = 0.0) -> Ints:
        """Adds rows to be filled with `put`."""
        first = len(self.rhs)
        self.rhs.extend([rhs] * count)
        return np.arange(first, first + count)

    def put(self, rows: Ints | int, cols: Ints | int, value: float | Floats) -> None:
        """Adds `value` at each (row, column); scalars are broadcast to the longer side."""
        r, c, v = np.broadcast_arrays(rows, cols, value)
        self._rows.append(np.atleast_1d(r))
        self._cols.append(np.atleast_1d(c))
        self._values.append(np.atleast_1d(v).astype(float))

    def add(self, rhs: float, *terms: tuple[int, float]) -> int:
        """Adds one row, given all its terms."""
        row = int(self.reserve(1, rhs)[0])
        self.put(row, np.array([c for c, _ in terms]), np.array([v for _, v in terms], dtype=float))
        return row

    def program(self, columns: Columns) -> LinearProgram:
        lo, hi, cost, whole = columns.arrays()
        matrix = Matrix.of(
            np.concatenate(self._rows or [np.zeros(0, dtype=np.int64)]),
            np.concatenate(self._cols or [np.zeros(0, dtype=np.int64)]),
            np.concatenate(self._values or [np.zeros(0)]),
            shape=(len(self.rhs), len(cost)),
        )
        return LinearProgram(cost, matrix, np.array(self.rhs), lo, hi, whole)
