"""Cells of a long program: which of them a gap frees, whatever the program's length."""

from __future__ import annotations

import pytest
from chains import link
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import DEVICE, Op, Problem, Tensor
from offcompile.passes.build.gaps import MOST_CELLS, _cells_within
from offcompile.passes.search.program_variant import Choices, ProgramVariant
from offcompile.planning.planner import plan_problem


@given(st.integers(1, 60), st.integers(1, 9), st.data())
def test_a_gap_frees_the_cells_wholly_within_it(n: int, width: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(-1, n - 1))
    last = data.draw(st.integers(0, n))
    runs = set(range(first + 1, last))
    if last <= first:  # round the step's end
        runs = {*range(first + 1, n), *range(last)}
    cells = {j // width for j in range(n)}
    whole = {c for c in cells if all(j in runs for j in range(n) if j // width == c)}
    found = [c for a, b in _cells_within(first, last, width, n) for c in range(a, b)]
    assert sorted(found) == sorted(whole)


@pytest.mark.parametrize("more", [0, 1, 2, 3])
def test_gradients_leave_at_the_end_of_a_program_of_any_length(more: int) -> None:
    """Each op leaves a gradient to the end of the step: all but a few have to go."""
    n, nbytes = 3 * MOST_CELLS + more, 10
    tensors = [Tensor(f"g{i}", nbytes, "gradient") for i in range(n)]
    ops = [Op(f"B{i}", "backward", 5, (), (f"g{i}",)) for i in range(n)]
    problem, machine = Problem(tuple(tensors), tuple(ops)), link(20 * nbytes, 10.0)
    gaps = ProgramVariant(problem, machine, Choices()).gaps
    assert max(gaps.held(range(len(gaps.gaps)))) <= 10 * nbytes
    result = plan_problem(problem, machine, seconds=1)
    assert result.timeline.peak_bytes[DEVICE] <= 20 * nbytes
    assert result.gap < 0.05
