"""Cells of a long program: which of them a gap frees, whatever the program's length."""

from __future__ import annotations

import pytest
from chains import bytes_range, chain, link
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import DEVICE, Op, Problem, Tensor
from offcompile.passes.build import gaps as gap_cells
from offcompile.passes.build.gaps import MOST_CELLS, cells_within
from offcompile.passes.joint import Joint
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
    ends = [*range(0, n, width), n]
    found = [c for a, b in cells_within(first, last, ends) for c in range(a, b)]
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


def uneven(layers: int) -> Problem:
    """A step that is not repeated; neighbouring layers differ in size."""
    sizes = [3 + i * 7 % 5 for i in range(layers + 1)]
    return chain([1] * layers, sizes, [2.0] * layers, steady=False)


@given(st.integers(4, 40), st.integers(2, 8), st.integers(-3, 20))
def test_cells_take_more_than_the_device_has_only_if_a_run_does(
    layers: int, width: int, room: int
) -> None:
    problem = uneven(layers)
    capacity = bytes_range(problem, link(None, 1.0))[0] + room
    machine = link(capacity, 1.0)
    with pytest.MonkeyPatch.context() as patch:
        exact = ProgramVariant(problem, machine, Choices()).gaps
        problem.forget()
        patch.setattr(gap_cells, "MOST_CELLS", -(-2 * layers // width))
        gaps = ProgramVariant(problem, machine, Choices()).gaps
        problem.forget()
    each = exact.held(range(len(exact.gaps)))
    held = gaps.held(range(len(gaps.gaps)))
    assert all(held[gaps.cell_of[run]] >= nbytes for run, nbytes in enumerate(each))
    assert (max(held) <= capacity) is (max(each) <= capacity)


def test_a_long_step_is_planned_within_its_floor_without_any_other_policy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried: list[object] = []
    monkeypatch.setattr(Joint, "_single_policies", lambda *args: tried.append(args))
    problem = uneven(2 * MOST_CELLS)
    capacity, _ = bytes_range(problem, link(None, 5.0))
    result = plan_problem(problem, link(capacity, 5.0), seconds=0.2, trial=True)
    assert result.timeline.peak_bytes[DEVICE] <= capacity
    assert not tried
