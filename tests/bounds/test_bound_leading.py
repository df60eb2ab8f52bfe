"""The bound of one moment where loads come before an op, and ops or updates after it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.bounds.moment.crossings import Crossings
from offcompile.bounds.moment.cut import cut_bound
from offcompile.bounds.moment.leading import ends_ns
from offcompile.bounds.survey import survey
from offcompile.ir import Lane, Machine, Op, Plan, Problem, Tensor, Tier
from offcompile.passes.registry import make
from offcompile.planning.planner import judge_for

NS = 1000.0


def machine(capacity: int = 10_000, d2h: float = 1.0) -> Machine:
    lanes = (Lane("h2d", "host", "device", 1.0), Lane("d2h", "device", "host", d2h))
    return Machine((Tier("device", capacity), Tier("host")), lanes)


def read_one_by_one(sizes: list[int], durations: list[float], added: float | None) -> Problem:
    """A chain of ops, each with a weight of its own on the host; added: what it takes longer to
    read it there."""
    tensors = [Tensor(f"w{i}", size, "weight", "host") for i, size in enumerate(sizes)]
    tensors += [Tensor(f"a{i}", 1, "activation") for i in range(len(sizes))]
    ops = []
    for i, us in enumerate(durations):
        before = (f"a{i - 1}",) if i else ()
        direct = {} if added is None else {f"w{i}": us + added}
        ops.append(Op(f"F{i}", "forward", us, (f"w{i}", *before), (f"a{i}",), direct=direct))
    return Problem(tuple(tensors), tuple(ops))


def ends_us(problem: Problem, on: Machine) -> list[float]:
    found = survey(problem, on)
    least = np.array(found.base_ns, dtype=float)
    ends = ends_ns(found, Crossings(found), least) / NS
    return [float(us) for us in ends]


def planned_us(problem: Problem, on: Machine) -> float:
    judge = judge_for(problem, on)
    plan = make("joint:evaluations=60,seconds=30", judge).apply(problem, on, Plan())
    return judge(problem, on, plan).makespan_us


def test_an_op_waits_for_all_loads_up_to_it_and_others_follow() -> None:
    problem = read_one_by_one([100, 50, 10], [20.0, 90.0, 30.0], None)
    assert ends_us(problem, machine()) == [120.0, 240.0, 270.0]
    found = cut_bound(survey(problem, machine()), math.inf) / NS
    assert found == pytest.approx(270.0, rel=0.01)
    assert found <= planned_us(problem, machine()) * (1 + 1e-9)


def test_an_operand_that_may_be_read_in_place_takes_the_lesser_time() -> None:
    problem = read_one_by_one([100, 50], [20.0, 90.0], 30.0)
    assert ends_us(problem, machine()) == [50.0, 140.0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 100), min_size=4, max_size=4),
    st.lists(st.integers(1, 60), min_size=4, max_size=4),
    st.one_of(st.none(), st.integers(0, 80)),
    st.integers(110, 500),
)
def test_no_plan_of_a_chain_is_faster(
    sizes: list[int], durations: list[int], added: int | None, capacity: int
) -> None:
    problem = read_one_by_one(sizes, [float(us) for us in durations], added)
    on, found_us = machine(capacity), planned_us(problem, machine(capacity))
    assert ends_us(problem, on)[-1] <= found_us * (1 + 1e-9)
    found = survey(problem, on)
    if not found.trivial:
        assert cut_bound(found, math.inf) / NS <= found_us * (1 + 1e-9)


def updates(host_us: float, pinned: bool, count: int = 4) -> Problem:
    """Gradients for the host after a long forward op that needs a weight from there."""
    tensors = [Tensor("w", 100, "weight", "host"), Tensor("a", 1, "activation")]
    ops = [Op("F", "forward", 40.0, ("w",), ("a",))]
    for i in range(count):
        tensors += [
            Tensor(f"v{i}", 1, "weight", "host", pinned=pinned),
            Tensor(f"g{i}", 30, "gradient"),
            Tensor(f"s{i}", 60, "state", "host", pinned=pinned),
        ]
        ops.append(Op(f"B{i}", "backward", 5.0, ("a",), (f"g{i}",)))
        read, written = (f"g{i}", f"v{i}", f"s{i}"), (f"v{i}", f"s{i}")
        ops.append(Op(f"U{i}", "update", 1.0, read, written, host_duration_us=host_us))
    return Problem(tuple(tensors), tuple(ops))


def test_the_host_waits_for_the_first_gradient() -> None:
    """100 µs of loads, 40 of forward, 5 of backward, 30 until the gradient is there, then 4 updates
    of 50 each."""
    problem = updates(50.0, pinned=True)
    found = cut_bound(survey(problem, machine()), math.inf) / NS
    assert found == pytest.approx(100 + 40 + 5 + 30 + 4 * 50, rel=0.01)
    assert found <= planned_us(problem, machine()) * (1 + 1e-9)


@pytest.mark.parametrize("host_us", [1.0, 20.0, 50.0, 200.0])
@pytest.mark.parametrize("d2h", [0.5, 1.0, 20.0])
@pytest.mark.parametrize("capacity", [250, 10_000])
def test_no_plan_with_updates_is_faster(host_us: float, d2h: float, capacity: int) -> None:
    problem, on = updates(host_us, pinned=False), machine(capacity, d2h)
    found = cut_bound(survey(problem, on), math.inf) / NS
    assert found <= planned_us(problem, on) * (1 + 1e-9)
