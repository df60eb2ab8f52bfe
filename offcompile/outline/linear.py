"""A program `min c·x, A x ≤ b, E x = f, 0 ≤ x ≤ most`, grown entry by entry. Some columns may have
to be integers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from offcompile.bounds.highs import Constraints, Floats, Matrix, Outcome, solve

Term = tuple[int, float]

#: with integers, an answer this near to the best will do
NEAR = 0.01


@dataclass
class _Rows:
    rhs: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def new(self, rhs: float, terms: Iterable[Term]) -> int:
        row = len(self.rhs)
        self.rhs.append(rhs)
        for column, value in terms:
            self.put(row, column, value)
        return row

    def put(self, row: int, column: int, value: float) -> None:
        self.rows.append(row)
        self.columns.append(column)
        self.values.append(value)

    def of(self, n_columns: int) -> Constraints:
        shape = len(self.rhs), n_columns
        return Constraints(Matrix.of(self.rows, self.columns, self.values, shape), self.rhs)


class Linear:
    """Entries at the same place add up."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._most: list[float] = []
        self._whole: list[bool] = []
        self._limits, self._equal = _Rows(), _Rows()

    @property
    def n_columns(self) -> int:
        return len(self._cost)

    def column(self, cost: float = 0.0, most: float = np.inf, whole: bool = False) -> int:
        """whole: its value must be an integer."""
        self._cost.append(cost)
        self._most.append(most)
        self._whole.append(whole)
        return len(self._cost) - 1

    def columns(self, count: int) -> list[int]:
        return [self.column() for _ in range(count)]

    def limit(self, rhs: float, *terms: Term) -> int:
        """Adds a row `Σ value · column ≤ rhs` and returns it."""
        return self._limits.new(rhs, terms)

    def put(self, row: int, column: int, value: float) -> None:
        """Adds to a row of `limit`."""
        self._limits.put(row, column, value)

    def take(self, row: int, amount: float) -> None:
        """Lowers the right side of a row of `limit`."""
        self._limits.rhs[row] -= amount

    def equal(self, rhs: float, *terms: Term) -> None:
        self._equal.new(rhs, terms)

    def solve(self, seconds: float) -> Floats | None:
        """The best values of all columns; None if there are none, or none within that time."""
        found = solve(
            self._cost,
            self._limits.of(self.n_columns),
            self._equal.of(self.n_columns),
            most=self._most,
            whole=self._whole,
            time_limit=seconds,
            mip_rel_gap=NEAR,
        )
        return found.x if found.outcome is Outcome.BEST else None
