"""The bound of one moment with chains of what runs again: below every plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from offcompile.bounds.moment import chains
from offcompile.bounds.moment.cut import cut_bound
from offcompile.bounds.survey import survey
from offcompile.ir import Infeasible, Lane, Machine, Op, Plan, Problem, Tensor, Tier
from offcompile.passes.registry import make
from offcompile.planning.planner import judge_for
from offcompile.testing import problems_with_machines

FAR_AWAY = float("inf")
MIB = 1 << 20
LAYERS = 8


def residual_stream(layers: int = LAYERS) -> Problem:
    """Sums that are cheap to make again only if the dear results that they add were kept."""
    tensors = [Tensor("x0", MIB, "activation", "device")]
    ops: list[Op] = []
    for i in range(layers):
        tensors += [Tensor(f"y{i}", MIB, "activation"), Tensor(f"x{i + 1}", MIB, "activation")]
        ops.append(Op(f"dear{i}", "forward", 100.0, (f"x{i}",), (f"y{i}",), recompute=True))
        sums = (f"x{i}", f"y{i}")
        ops.append(Op(f"add{i}", "forward", 1.0, sums, (f"x{i + 1}",), recompute=True))
    tensors.append(Tensor(f"g{layers}", MIB, "activation"))
    ops.append(Op("loss", "forward", 10.0, (f"x{layers}",), (f"g{layers}",)))
    for i in reversed(range(layers)):
        tensors.append(Tensor(f"g{i}", MIB, "activation" if i else "gradient"))
        ops.append(Op(f"back{i}", "backward", 200.0, (f"x{i}", f"g{i + 1}"), (f"g{i}",)))
    return Problem(tuple(tensors), tuple(ops))


def slow_machine(mib: int) -> Machine:
    lanes = (Lane("h2d", "host", "device", MIB / 1e4), Lane("d2h", "device", "host", MIB / 1e4))
    return Machine((Tier("device", mib * MIB), Tier("host")), lanes)


def without_chains(problem: Problem, machine: Machine) -> float:
    kept = chains.Chains.best
    chains.Chains.best = lambda *_: None  # type: ignore[method-assign]
    try:
        return cut_bound(survey(problem, machine), FAR_AWAY)
    finally:
        chains.Chains.best = kept  # type: ignore[method-assign]


def test_what_runs_again_pays_for_its_operands() -> None:
    problem, machine = residual_stream(), slow_machine(6)
    compute_us = sum(op.duration_us for op in problem.ops)
    simple_us = without_chains(problem, machine) / 1e3
    found_us = cut_bound(survey(problem, machine), FAR_AWAY) / 1e3
    plan = make("joint", judge_for(problem, machine), seconds=2.0).apply(problem, machine, Plan())
    planned_us = judge_for(problem, machine)(problem, machine, plan).makespan_us
    assert compute_us < simple_us < compute_us + 20.0
    # a dear op and its sum for each of those that cannot stay
    assert simple_us + 200.0 < found_us <= planned_us


def saved_twice(layers: int = LAYERS) -> Problem:
    """Backward needs results that cannot be made again, and others that are made from them."""
    tensors = [Tensor("x0", MIB, "activation", "device")]
    ops: list[Op] = []
    for i in range(layers):
        tensors += [Tensor(name, MIB, "activation") for name in (f"r{i}", f"s{i}", f"x{i + 1}")]
        ops.append(Op(f"drop{i}", "forward", 10.0, (f"x{i}",), (f"r{i}",)))
        ops.append(Op(f"act{i}", "forward", 100.0, (f"r{i}",), (f"s{i}",), recompute=True))
        ops.append(Op(f"next{i}", "forward", 10.0, (f"s{i}",), (f"x{i + 1}",)))
    tensors.append(Tensor(f"g{layers}", MIB, "activation"))
    ops.append(Op("loss", "forward", 10.0, (f"x{layers}",), (f"g{layers}",)))
    for i in reversed(range(layers)):
        tensors.append(Tensor(f"g{i}", MIB, "activation" if i else "gradient"))
        reads = (f"r{i}", f"s{i}", f"g{i + 1}")
        ops.append(Op(f"back{i}", "backward", 200.0, reads, (f"g{i}",)))
    return Problem(tuple(tensors), tuple(ops))


def test_what_backward_needs_anyway_costs_recomputations_nothing() -> None:
    problem, machine = saved_twice(), slow_machine(LAYERS + 4)
    planned_us = check_bound(problem, machine)
    assert planned_us is not None
    compute_us = sum(op.duration_us for op in problem.ops)
    assert planned_us <= compute_us + LAYERS * 100.0  # nothing moves over the slow links


@settings(max_examples=100, deadline=None)
@given(problems_with_machines())
def test_no_plan_is_faster(drawn: tuple[Problem, Machine]) -> None:
    check_bound(*drawn)


@pytest.mark.soak
@settings(max_examples=1000, deadline=None)
@given(problems_with_machines())
def test_no_plan_of_many_is_faster(drawn: tuple[Problem, Machine]) -> None:
    check_bound(*drawn)


def check_bound(problem: Problem, machine: Machine) -> float | None:
    """Compare the bound with a plan; returns its time, or None if there is none to compare."""
    found = survey(problem, machine)
    if problem.steady or found.trivial:
        return None
    judge = judge_for(problem, machine)
    try:
        plan = make("joint:evaluations=40,seconds=30", judge).apply(problem, machine, Plan())
    except Infeasible:
        return None
    makespan_us = judge(problem, machine, plan).makespan_us
    bound_us = cut_bound(found, FAR_AWAY) / 1e3
    assert bound_us <= makespan_us * (1 + 1e-9) + 1e-6
    return makespan_us
