"""The default policy: untouched when all fits, never worse than the parts, honest in refusal."""

from __future__ import annotations

import random

import pytest
from chains import bytes_range, chain, link, random_chain

from offcompile.ir import Infeasible, Machine, Op, Problem, Tensor, Tier
from offcompile.passes.joint import Joint
from offcompile.passes.search.least_memory import least_bytes
from offcompile.passes.search.starts import Starts
from offcompile.planning.planner import check_plan, plan_problem


def test_when_everything_fits_nothing_moves():
    problem = chain([100] * 6, [10] * 7, [10.0] * 6)
    result = plan_problem(problem, link(10_000, 50.0), "joint", seconds=2)
    assert result.plan.moves == () and result.plan.recomputes == () and result.plan.drops == ()
    assert result.makespan_us == 180.0 and result.gap == 0.0


def test_zero_idle_where_the_link_is_no_limit():
    rng = random.Random(1)
    problem, machine = random_chain(rng, 8, 0.4, 0.5)
    result = plan_problem(problem, machine, "joint:evaluations=600,seconds=60", seconds=60)
    assert result.makespan_us == sum(op.duration_us for op in problem.ops)


def test_activations_trade_places_with_weights():
    # large activations, small weights: to rotate weights alone cannot free enough
    problem = chain([10] * 6, [100] * 7, [100.0] * 6)
    low, high = bytes_range(problem, link(None, 50.0))
    machine = link((low + high) // 2, 50.0)
    result = plan_problem(problem, machine, "joint:evaluations=400,seconds=60", seconds=60)
    moved = {m.tensor for m in result.plan.moves}
    assert any(t.startswith("a") for t in moved)
    assert result.makespan_us == 1800.0


def test_over_budget_says_by_how_much_and_what_would_help():
    problem = chain([100] * 4, [10] * 5, [10.0] * 4)
    low, _ = bytes_range(problem, link(None, 50.0))
    with pytest.raises(Infeasible) as error:
        plan_problem(problem, link(low - 7, 50.0), "joint", seconds=2)
    assert error.value.needed_bytes == 7
    assert f"{low:,}" in error.value.smallest_change
    plan_problem(problem, link(low, 50.0), "joint", seconds=2)


def test_an_op_that_is_too_large_is_helped_by_direct_access():
    tensors = (
        Tensor("table", 1000, "weight", "host"),
        Tensor("x", 10, "input", "device"),
        Tensor("y", 10, "output"),
    )
    op = Op("gather", "forward", 5.0, ("table", "x"), ("y",), direct={"table": 9.0})
    problem = Problem(tensors, (op,), False)
    result = plan_problem(problem, link(100, 50.0), "joint", seconds=1)
    assert [d.tensor for d in result.plan.directs] == ["table"]
    assert result.makespan_us == 9.0
    assert result.timeline.peak_bytes["device"] <= 100


def test_the_same_input_gives_the_same_plan():
    problem, machine = random_chain(random.Random(5), 6, 0.3, 1.2)
    first = plan_problem(problem, machine, "joint:evaluations=300,seconds=60", seconds=60)
    second = plan_problem(problem, machine, "joint:evaluations=300,seconds=60", seconds=60)
    assert first.plan == second.plan


def test_spill_to_disk_when_the_host_is_small():
    problem = chain([10] * 6, [100] * 7, [100.0] * 6)
    machine = link(None, 50.0, disk=True).with_capacity("host", 160)
    low, high = bytes_range(problem, machine)
    machine = machine.with_capacity("device", (low + high) // 2)
    result = plan_problem(problem, machine, "joint:evaluations=400,seconds=60", seconds=60)
    assert check_plan(problem, machine, result.plan).valid
    assert result.timeline.peak_bytes["host"] <= 160


def chain_of_recomputations(layers: int) -> Problem:
    """Forward ops that may run again, and backward ops that read their own and the one before."""
    tensors = [Tensor("x", 10, "input", "device")]
    tensors += [Tensor(f"a{i}", 100, "activation") for i in range(layers)]
    forward = [
        Op(
            f"F{i}",
            "forward",
            1.0,
            ("x",) if i == 0 else (f"a{i - 1}",),
            (f"a{i}",),
            recompute=True,
        )
        for i in range(layers)
    ]
    backward = [
        Op(f"B{i}", "backward", 2.0, (f"a{i}", *([f"a{i - 1}"] if i else [])))
        for i in reversed(range(layers))
    ]
    return Problem(tuple(tensors), (*forward, *backward), False)


@pytest.mark.parametrize("layers", [3, 4, 6])
def test_chains_of_recomputation_are_the_way_out_where_nothing_can_leave(layers):
    # two activations and the input: 210 bytes, whatever the depth
    problem = chain_of_recomputations(layers)
    machine = Machine((Tier("device", 210),))
    result = plan_problem(problem, machine, "joint", seconds=1)
    assert result.timeline.peak_bytes["device"] == 210
    with pytest.raises(Infeasible):
        plan_problem(problem, Machine((Tier("device", 209),)), "joint", seconds=1)


def test_where_no_plan_can_fit_none_is_looked_for(monkeypatch):
    """One op needs more than the device has, whatever else moves or runs again."""
    problem, machine = chain_of_recomputations(6), link(199, 10.0)
    assert least_bytes(problem, machine) == 200
    searched = []
    monkeypatch.setattr(Starts, "recomputing", lambda *args: searched.append(args) or [])
    monkeypatch.setattr(Joint, "_single_policies", lambda *args: searched.append(args))
    with pytest.raises(Infeasible) as error:
        plan_problem(problem, machine, "joint", seconds=1)
    assert error.value.needed_bytes == 1
    assert not searched
    assert plan_problem(problem, machine.with_capacity("device", 200), seconds=1) and searched


def test_the_largest_need_is_the_one_reported():
    tensors = (Tensor("a", 100, "input", "host"), Tensor("b", 300, "input", "host"))
    ops = (Op("A", "forward", 1.0, ("a",)), Op("B", "forward", 1.0, ("b",)))
    with pytest.raises(Infeasible) as error:
        plan_problem(Problem(tensors, ops, False), link(0, 10.0), "joint", seconds=1)
    assert error.value.needed_bytes == 300
    assert plan_problem(Problem(tensors, ops, False), link(300, 10.0), "joint", seconds=1)


def test_an_output_that_nobody_writes_is_named():
    problem = Problem((Tensor("y", 10, "output"),), (), False)
    with pytest.raises(Infeasible, match="output y must be there") as error:
        plan_problem(problem, link(None, 10.0), "joint", seconds=1)
    assert "home" in error.value.smallest_change


def test_durations_beyond_exact_floats_stand_the_audit():
    problem = Problem((), (Op("F", "forward", 8.9e12 + 0.125),), False)
    result = plan_problem(problem, link(None, 10.0), "joint", seconds=1)
    assert check_plan(problem, link(None, 10.0), result.plan).valid
