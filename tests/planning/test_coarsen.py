"""Merged ops change neither what a plan takes nor what it holds."""

from __future__ import annotations

import random

from chains import bytes_range, chain, link
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import Infeasible, Op, Plan, Problem, Recompute, Tensor
from offcompile.passes.registry import make
from offcompile.planning.coarsen import Coarse, coarsen
from offcompile.planning.planner import check_plan, judge_for
from offcompile.simulate import Simulator


def fine_chain(rng: random.Random, layers: int) -> Problem:
    """A chain whose layers end in runs of element-wise ops on short-lived tensors."""
    base = chain(
        [rng.randint(20, 100) for _ in range(layers)],
        [rng.randint(5, 60) for _ in range(layers + 1)],
        [float(rng.randint(2, 9)) for _ in range(layers)],
        steady=rng.random() < 0.7,
    )
    tensors, ops = list(base.tensors), []
    for op in base.ops:
        ops.append(op)
        previous = None
        for k in range(rng.randint(0, 4)):
            name = f"{op.id}.t{k}"
            tensors.append(Tensor(name, rng.randint(0, 30), "temporary"))
            reads = () if previous is None else (previous,)
            ops.append(Op(f"{op.id}.e{k}", op.phase, rng.choice([0.5, 1.25]), reads, (name,)))
            previous = name
    return Problem(tuple(tensors), tuple(ops), base.steady)


def test_a_run_of_elementwise_ops_becomes_one_with_their_peak():
    tensors = (
        Tensor("x", 10, "input", "device"),
        Tensor("t", 40, "temporary"),
        Tensor("u", 30, "temporary"),
        Tensor("y", 10, "output"),
    )
    ops = (
        Op("a", "forward", 1.5, ("x",), ("t",), workspace_bytes=5),
        Op("b", "forward", 1.0, ("x", "t"), ("u",)),
        Op("c", "forward", 1.0, ("x", "u"), ("y",)),
    )
    coarse = coarsen(Problem(tensors, ops, False))
    assert coarse.groups == {"a": ("a", "b"), "c": ("c",)}
    merged = coarse.problem.op["a"]
    # t and u stand together while b runs: 70 bytes, of which u goes on to c
    assert (merged.reads, merged.writes) == (("x",), ("u",))
    assert (merged.duration_us, merged.workspace_bytes) == (2.5, 40)


@given(st.integers(0, 10**6))
@settings(max_examples=80)
def test_a_coarse_plan_is_a_fine_plan(seed):
    rng = random.Random(seed)
    problem = fine_chain(rng, rng.randint(1, 5))
    coarse = coarsen(problem)
    assert [o for c in coarse.problem.ops for o in coarse.groups[c.id]] == [
        o.id for o in problem.ops
    ]
    machine = link(None, rng.choice([5.0, 50.0]))
    low, high = bytes_range(problem, machine)
    machine = machine.with_capacity("device", int(low + rng.random() * (high - low)))
    judge = judge_for(coarse.problem, machine)
    try:
        plan = make("weight_rotation", judge).apply(coarse.problem, machine, Plan())
    except Infeasible:
        return
    wide = Simulator(coarse.problem, machine).run(plan)
    fine = check_plan(problem, machine, coarse.expand(plan))
    assert fine.violations == ()
    assert fine.timeline.makespan_us <= wide.makespan_us
    assert fine.timeline.peak_bytes["device"] <= wide.peak_bytes["device"]


def test_without_a_budget_nothing_differs():
    rng = random.Random(4)
    problem = fine_chain(rng, 4)
    coarse = coarsen(problem)
    assert len(coarse.problem.ops) < len(problem.ops)
    machine = link(None, 50.0)
    plan = make("joint", judge_for(coarse.problem, machine)).apply(coarse.problem, machine, Plan())
    wide = Simulator(coarse.problem, machine).run(plan)
    fine = Simulator(problem, machine).run(coarse.expand(plan))
    assert (fine.makespan_us, fine.peak_bytes) == (wide.makespan_us, wide.peak_bytes)


def test_recomputations_of_ops_that_only_another_problem_has_are_left_out() -> None:
    problem = chain([4, 4], [8, 8, 8], [1.0, 1.0], recompute=True)
    known = Plan(recomputes=(Recompute("F0", "B1"), Recompute("loss", "B1"), Recompute("F1", "L")))
    assert Coarse.same(problem).reruns(known) == {("F0", "B1")}
