"""Linear programs are solved as SciPy solves them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.bounds import highs
from offcompile.bounds.highs import Constraints, Matrix, Outcome, solve

scipy_optimize = pytest.importorskip("scipy.optimize")

figures = st.integers(-4, 4).map(float)


@st.composite
def programs(draw: st.DrawFn) -> dict[str, Any]:
    width, limits, equal = draw(st.integers(1, 5)), draw(st.integers(0, 4)), draw(st.integers(0, 2))

    def row() -> list[float]:
        return draw(st.lists(figures, min_size=width, max_size=width))

    return {
        "cost": row(),
        "limits": [row() for _ in range(limits)],
        "limited": draw(st.lists(figures, min_size=limits, max_size=limits)),
        "equal": [row() for _ in range(equal)],
        "equals": draw(st.lists(figures, min_size=equal, max_size=equal)),
        "most": draw(st.lists(st.integers(0, 5).map(float), min_size=width, max_size=width)),
        "whole": draw(st.lists(st.booleans(), min_size=width, max_size=width)),
    }


@given(programs(), st.booleans())
def test_the_best_is_as_good_as_scipys(p: dict[str, Any], may_be_whole: bool) -> None:
    width, whole = len(p["cost"]), p["whole"] if may_be_whole else []
    found = solve(
        p["cost"],
        Constraints(Matrix.dense(p["limits"], width), p["limited"]),
        Constraints(Matrix.dense(p["equal"], width), p["equals"]),
        most=p["most"],
        whole=whole,
    )
    wanted = scipy_optimize.linprog(
        p["cost"],
        A_ub=p["limits"] or None,
        b_ub=p["limited"] or None,
        A_eq=p["equal"] or None,
        b_eq=p["equals"] or None,
        bounds=[(0, most) for most in p["most"]],
        integrality=p["whole"] if may_be_whole else None,
    )
    assert (found.outcome is Outcome.BEST) == (wanted.status == 0)
    assert (found.outcome is Outcome.INFEASIBLE) == (wanted.status == 2)
    if found.x is None:
        return
    assert np.dot(found.x, p["cost"]) == pytest.approx(wanted.fun, abs=1e-6)
    assert (
        np.dot(np.reshape(p["limits"], (-1, width)), found.x) <= np.add(p["limited"], 1e-6)
    ).all()
    if any(whole):
        assert found.bound == pytest.approx(wanted.fun, abs=1e-3)
        assert all(x == round(x) for x, is_whole in zip(found.x, whole, strict=True) if is_whole)
    else:
        assert found.row_duals is not None
        assert len(found.row_duals) == len(p["limits"]) + len(p["equal"])
        assert (found.row_duals[: len(p["limits"])] <= 1e-9).all()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), figures), max_size=20))
def test_entries_at_one_place_add_up(entries: list[tuple[int, int, float]]) -> None:
    rows, columns, values = zip(*entries, strict=True) if entries else ((), (), ())
    matrix = Matrix.of(rows, columns, values, (4, 3))
    whole = np.zeros((4, 3))
    np.add.at(whole, (matrix.rows, matrix.columns), matrix.values)
    begins, down, told = matrix.by_columns()
    again = np.zeros((4, 3))
    for column in range(3):
        mine = slice(begins[column], begins[column + 1])
        assert sorted(set(down[mine])) == list(down[mine])
        again[down[mine], column] = told[mine]
    assert (again == whole).all()
    y = np.arange(1.0, 5.0)
    assert matrix.transposed_times(y) == pytest.approx(whole.T @ y)
    both = matrix.above(Matrix.dense([[1.0, 0.0, 2.0]], 3))
    assert both.shape == (5, 3) and both.transposed_times(np.eye(5)[4]).tolist() == [1.0, 0.0, 2.0]


def test_an_option_that_highs_does_not_know_is_refused() -> None:
    with pytest.raises((RuntimeError, AttributeError)):
        solve([1.0], Constraints(Matrix.dense([[1.0]], 1), [1.0]), no_such_option=1.0)


def test_scipys_highs_stands_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy._core", None)
    other = highs.load()
    assert other.__name__ == "scipy.optimize._highspy._core"
    monkeypatch.setattr(highs, "highs", other)
    assert solve([1.0], Constraints(Matrix.dense([[-1.0]], 1), [-2.0])).x == pytest.approx([2.0])
    monkeypatch.setitem(sys.modules, "scipy.optimize._highspy._core", None)
    with pytest.raises(ImportError, match="pip install highspy"):
        highs.load()
