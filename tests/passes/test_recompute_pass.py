"""Recomputation: who runs again, before whom, and whether it fits."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.activation_chain import chain
from offcompile.ir import (
    DEVICE,
    Infeasible,
    Machine,
    Op,
    Plan,
    Problem,
    Recompute,
    Tensor,
    Tier,
    Timeline,
)
from offcompile.passes.recompute import Recomputation, spread_sets
from offcompile.passes.select.droppable import droppable_ops, recomputes_for
from offcompile.simulate import Simulator


def judge(problem: Problem, machine: Machine, plan: Plan) -> Timeline:
    return Simulator(problem, machine).run(plan)


def ladder(layers: int, writes_weight: bool = False) -> Problem:
    """F0 … Fn, then Bn … B0, where Bi reads what Fi wrote and what it had read."""
    tensors = [Tensor("x", 10, "input", DEVICE), Tensor("w", 10, "weight", DEVICE)]
    tensors += [Tensor(f"a{i}", 100, "activation") for i in range(layers)]
    ops = [
        Op(f"F{i}", "forward", 10.0, (f"a{i - 1}" if i else "x", "w"), (f"a{i}",), recompute=True)
        for i in range(layers)
    ]
    if writes_weight:
        ops.append(Op("U", "update", 1.0, ("w",), ("w",)))
    for i in reversed(range(layers)):
        ops.append(Op(f"B{i}", "backward", 20.0, (f"a{i}", f"a{i - 1}" if i else "x"), ()))
    return Problem(tuple(tensors), tuple(ops))


def device(nbytes: int) -> Machine:
    return Machine((Tier(DEVICE, nbytes),))


def test_an_op_runs_again_before_the_first_later_reader() -> None:
    problem = ladder(4)
    droppable = droppable_ops(problem)
    # a3 has no gap: it is read as soon as it is written
    assert [(d.op, d.first, d.last) for d in droppable] == [
        ("F0", 2, 5),  # read by F1, then by B1 (position 6)
        ("F1", 3, 4),
    ]
    assert recomputes_for(problem, droppable, ["F1"]) == (Recompute("F1", "B2"),)


def test_a_chain_runs_again_in_order_before_its_last_link() -> None:
    problem = ladder(5)
    again = recomputes_for(problem, droppable_ops(problem), ["F2", "F1"])
    assert again == (Recompute("F1", "B3"), Recompute("F2", "B3"))


def test_an_op_whose_input_was_overwritten_cannot_run_again() -> None:
    problem = ladder(5, writes_weight=True)
    assert recomputes_for(problem, droppable_ops(problem), ["F1", "F2"]) == ()


def test_ops_that_change_what_others_see_are_left_alone() -> None:
    tensors = (
        Tensor("w", 10, "weight", DEVICE),
        Tensor("a", 100, "activation"),
        Tensor("b", 100, "activation"),
    )
    ops = (
        Op("in_place", "forward", 1.0, ("w",), ("w", "a"), recompute=True),
        Op("marked", "forward", 1.0, ("w",), ("b",), recompute=True),
        Op("unmarked", "forward", 1.0, ("a",), ()),
        Op("wait", "forward", 1.0),
        Op("use", "backward", 1.0, ("a", "b"), ()),
    )
    assert [d.op for d in droppable_ops(Problem(tensors, ops))] == ["marked"]


def test_spread_sets_keep_every_kth() -> None:
    sets = spread_sets([str(i) for i in range(9)])
    assert ["0", "1", "3", "4", "6", "7"] in sets
    assert all(sets)
    assert ["0", "1", "2", "3"] not in sets


def test_one_op_is_enough_where_one_activation_is_too_many() -> None:
    problem = ladder(4)
    peak = 20 + 400
    plan = Recomputation(judge=judge).apply(problem, device(peak), Plan())
    assert plan.recomputes == ()
    plan = Recomputation(judge=judge).apply(problem, device(peak - 1), Plan())
    assert len(plan.recomputes) == 1
    timeline = judge(problem, device(peak - 1), plan)
    assert timeline.valid
    assert timeline.makespan_us == 4 * 10 + 4 * 20 + 10


def test_infeasible_says_what_would_be_enough() -> None:
    problem = ladder(6)
    policy = Recomputation(judge=judge)
    with pytest.raises(Infeasible) as caught:
        policy.apply(problem, device(100), Plan())
    missing = caught.value.needed_bytes
    assert missing is not None
    assert f"{100 + missing:,} bytes" in caught.value.smallest_change
    enough = device(100 + missing)
    assert judge(problem, enough, policy.apply(problem, enough, Plan())).valid


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 14),
    st.integers(0, 10**6),
    st.sampled_from([0.1, 0.3, 0.6, 0.9, 1.0]),
    st.booleans(),
    st.sampled_from(["benefit", "all", "sqrt"]),
)
def test_a_legal_plan_or_infeasible(
    layers: int, seed: int, fraction: float, steady: bool, variant: str
) -> None:
    problem, machine = chain(layers, seed, fraction=fraction, steady=steady)
    policy = Recomputation(variant, judge=judge)
    try:
        plan = policy.apply(problem, machine, Plan())
    except Infeasible as error:
        assert error.needed_bytes is None or error.needed_bytes > 0
        return
    timeline = judge(problem, machine, plan)
    assert timeline.valid, timeline.violations
    assert not plan.moves
    added = sum(problem.op[r.op].duration_us for r in plan.recomputes)
    compute = sum(op.duration_us for op in problem.ops)
    assert timeline.makespan_us == pytest.approx(compute + added, abs=0.1)
    assert fraction < 1.0 or not plan.recomputes


def test_benefit_adds_least() -> None:
    compared = 0
    for seed in range(6):
        problem, machine = chain(16, seed, fraction=0.6)
        made = {}
        for variant in ("benefit", "sqrt", "all"):
            try:
                plan = Recomputation(variant, judge=judge).apply(problem, machine, Plan())
            except Infeasible:
                continue
            made[variant] = judge(problem, machine, plan).makespan_us
        assert made.get("benefit", float("inf")) <= min(made.values(), default=float("inf"))
        compared += len(made) > 1
    assert compared >= 3


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="it must be one of benefit, all, sqrt"):
        Recomputation("some")
