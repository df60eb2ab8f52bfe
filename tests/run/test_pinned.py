"""Pinned tensors: they count, and nobody moves, drops or accesses them in place."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from chains import bytes_range, chain, link
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_laws import SPECS

from offcompile.bounds import lower_bound
from offcompile.ir import (
    DEVICE,
    HOST,
    Direct,
    Drop,
    Infeasible,
    InvalidInput,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Start,
    Tensor,
)
from offcompile.ir.jsonio import problem_from_json, problem_to_json
from offcompile.ir.textio import parse_problem, print_problem
from offcompile.ir.verify import check_structure
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.gaps import find_gaps
from offcompile.passes.build.program import Program
from offcompile.passes.registry import make
from offcompile.planning.coarsen import coarsen
from offcompile.planning.planner import certify, check_plan, judge_for, plan_problem
from offcompile.simulate import Simulator
from offcompile.testing import problems_with_machines


def small(pinned: bool, steady: bool = False, home: str = DEVICE) -> Problem:
    tensors = (
        Tensor("w", 40, "weight", home, pinned=pinned),
        Tensor("a", 30, "activation"),
        Tensor("g", 40, "gradient"),
    )
    ops = (
        Op("F", "forward", 5, ("w",), ("a",), direct={"w": 9}),
        Op("X", "forward", 5, (), (), workspace_bytes=50),
        Op("B", "backward", 5, ("w", "a"), ("g",)),
        Op("U", "update", 5, ("w", "g"), ("w",), host_duration_us=5),
    )
    return Problem(tensors, ops, steady)


def test_json_names_it_only_where_it_is_true():
    for pinned in (False, True):
        problem = small(pinned)
        rows = problem_to_json(problem)["tensors"]
        assert [r.get("pinned") for r in rows] == [True if pinned else None, None, None]
        assert problem_from_json(problem_to_json(problem)) == problem
        assert parse_problem(print_problem(problem)) == problem
    assert "tensor w 40 weight home device pinned\n" in print_problem(small(True))
    with pytest.raises(InvalidInput, match="pinned"):
        problem_from_json({"tensors": [{"id": "x", "nbytes": 1, "kind": "input", "pinned": 1}]})


@pytest.mark.parametrize(
    ("plan", "where"),
    [
        (Plan(moves=(Move("m", "w", DEVICE, HOST, "d2h"),)), "move m"),
        (Plan(drops=(Drop("w", DEVICE, "F"),)), "drop of w from device"),
        (Plan(directs=(Direct("F", "w"),)), "direct F, w"),
    ],
)
def test_what_a_plan_may_not_do_with_it(plan, where):
    plan = replace(plan, start=(Start("w", DEVICE),))
    machine = link(None, 10.0)
    assert check_structure(small(False), machine, plan) == ()
    (found,) = check_structure(small(True), machine, plan)
    assert (found.rule, found.where) == ("bad-value", where)
    assert "w is pinned" in found.detail


def test_it_starts_at_home():
    plan = Plan(start=(Start("w", HOST), Start("g", DEVICE)))
    machine = link(None, 10.0)
    assert check_structure(small(False, steady=True), machine, plan) == ()
    (found,) = check_structure(small(True, steady=True), machine, plan)
    assert (found.rule, found.where) == ("bad-value", "start of w")


def test_it_counts_and_offers_no_gap():
    machine = link(None, 10.0)
    free, held = (find_gaps(Program(small(p), Decisions()), machine) for p in (False, True))
    assert {g.tensor.id for g in free.gaps} == {"w", "a"}
    assert {g.tensor.id for g in held.gaps} == {"a"}
    assert free.full == held.full


def test_what_is_pinned_and_never_used_counts_too():
    idle = Tensor("idle", 25, "input", DEVICE, pinned=True)
    for steady in (False, True):
        base = small(True, steady)
        problem = Problem((*base.tensors, idle), base.ops, steady)
        machine = link(None, 10.0)
        less = max(find_gaps(Program(base, Decisions()), machine).full)
        assert max(find_gaps(Program(problem, Decisions()), machine).full) == less + 25
        result = plan_problem(problem, machine, seconds=1)
        assert Start("idle", DEVICE) in result.plan.start
        assert result.timeline.peak_bytes[DEVICE] == less + 25


def test_a_pinned_gradient_or_input_stays_to_the_end():
    tensors = (
        Tensor("x", 30, "input", DEVICE, pinned=True),
        Tensor("g", 20, "gradient", pinned=True),
        Tensor("y", 5, "output"),
    )
    ops = (
        Op("A", "forward", 5, ("x",), ("g",)),
        Op("B", "backward", 5, ("g",), ("y",)),
        Op("C", "backward", 5, workspace_bytes=60),
    )
    problem = Problem(tensors, ops)
    result = plan_problem(problem, link(115, 10.0), seconds=1)
    assert result.timeline.peak_bytes[DEVICE] == 115
    # y alone can leave before C
    assert plan_problem(problem, link(110, 10.0), seconds=1).timeline.peak_bytes[DEVICE] == 110
    with pytest.raises(Infeasible, match="C needs 110 bytes"):
        plan_problem(problem, link(109, 10.0), seconds=1)


def test_one_that_is_pinned_elsewhere_cannot_be_used_on_the_device():
    problem = small(True, home=HOST)
    with pytest.raises(Infeasible, match="w is pinned to host"):
        plan_problem(problem, link(None, 10.0), seconds=1)


def test_a_pinned_activation_may_be_computed_again():
    problem = chain([10] * 4, [30] * 5, [5.0] * 4, steady=False, recompute=True)
    tensors = tuple(
        replace(t, pinned=True, home=None if t.kind == "activation" else DEVICE)
        if t.kind in ("activation", "weight", "input")
        else t
        for t in problem.tensors
    )
    problem = Problem(tensors, problem.ops)
    machine = link(None, 10.0)
    most = plan_problem(problem, machine, seconds=1).timeline.peak_bytes[DEVICE]
    tight = plan_problem(problem, machine.with_capacity(DEVICE, most - 30), "joint", seconds=3)
    assert tight.plan.recomputes and not tight.plan.moves
    assert tight.lower_bound_us <= tight.makespan_us


def touched(plan: Plan) -> set[str]:
    return {x.tensor for x in (*plan.moves, *plan.drops, *plan.directs)}


def pin_some(problem: Problem, draw: st.DataObject) -> Problem:
    names = [t.id for t in problem.tensors if t.home in (None, DEVICE)]
    chosen = draw.draw(st.sets(st.sampled_from(names))) if names else set()
    tensors = tuple(replace(t, pinned=t.id in chosen) for t in problem.tensors)
    return Problem(tensors, problem.ops, problem.steady)


@pytest.mark.parametrize("spec", [s.replace("evaluations=150", "evaluations=40") for s in SPECS])
@given(st.data())
@settings(max_examples=10)
def test_every_policy_leaves_them_alone(spec, data):
    problem, machine = data.draw(problems_with_machines())
    problem = pin_some(problem, data)
    try:
        plan = make(spec, judge_for(problem, machine)).apply(problem, machine, Plan())
        timeline = certify(problem, machine, plan, spec)
    except Infeasible:
        return
    assert not touched(plan) & {t.id for t in problem.tensors if t.pinned}
    assert lower_bound(problem, machine, seconds=0.5).us <= timeline.makespan_us + 1e-9


def test_the_bound_knows_that_they_stay():
    """Two pinned weights leave room for one of the other two at a time: more has to move."""
    problem = chain([60] * 4, [5] * 5, [4.0] * 4)
    pinned = {"w0", "w1"}
    tensors = tuple(
        replace(t, pinned=t.id in pinned, home=DEVICE if t.id in pinned else t.home)
        for t in problem.tensors
    )
    machine = link(270, 5.0)
    free = lower_bound(problem, machine, seconds=2)
    held = lower_bound(Problem(tensors, problem.ops, True), machine, seconds=2)
    assert held.us >= free.us * (1 - 1e-6) and not held.infeasible
    plan = plan_problem(Problem(tensors, problem.ops, True), machine, seconds=2)
    assert held.us <= plan.makespan_us
    assert not {t for t, _ in held.away_hints} & pinned


def pinned_chain(rng: random.Random, layers: int) -> tuple[Problem, Machine]:
    """A step as it is captured: weights, inputs and gradients pinned, activations not."""
    tensors = [Tensor("x", rng.randint(5, 40), "input", DEVICE, pinned=True)]
    ops: list[Op] = []
    last = "x"
    for i in range(layers):
        tensors.append(Tensor(f"w{i}", rng.randint(5, 40), "weight", DEVICE, pinned=True))
        tensors += [Tensor(f"b{i}", 3, "weight", DEVICE, pinned=True)]
        tensors += [Tensor(f"h{i}", rng.randint(5, 40), "temporary")]
        tensors += [Tensor(f"a{i}", rng.randint(5, 40), "activation", pinned=rng.random() < 0.3)]
        again = rng.random() < 0.3
        ops.append(Op(f"F{i}", "forward", 3, (last, f"w{i}"), (f"h{i}",), recompute=again))
        ops.append(Op(f"G{i}", "forward", 1, (f"h{i}", f"b{i}"), (f"a{i}",), recompute=again))
        last = f"a{i}"
    for i in reversed(range(layers)):
        tensors += [Tensor(f"gw{i}", tensors[1].nbytes, "gradient", pinned=True)]
        tensors += [Tensor(f"gb{i}", 3, "gradient", pinned=True)]
        tensors.append(Tensor(f"d{i}", rng.randint(5, 40), "temporary"))
        grad = (f"d{i + 1}",) if i + 1 < layers else ()
        ops.append(Op(f"B{i}", "backward", 4, (f"a{i}", *grad), (f"d{i}",)))
        ops.append(Op(f"C{i}", "backward", 1, (f"d{i}",), (f"gb{i}",)))
        ops.append(Op(f"D{i}", "backward", 2, (f"d{i}", f"w{i}"), (f"gw{i}",)))
    problem = Problem(tuple(tensors), tuple(ops))
    machine = link(None, rng.choice([5.0, 20.0]))
    low, high = bytes_range(problem, machine)
    return problem, machine.with_capacity(DEVICE, int(low + rng.random() * (high - low)))


@given(st.integers(0, 10**6))
@settings(max_examples=60)
def test_a_coarse_plan_with_pinned_tensors_is_a_fine_plan(seed):
    rng = random.Random(seed)
    problem, machine = pinned_chain(rng, rng.randint(1, 4))
    coarse = coarsen(problem)
    judge = judge_for(coarse.problem, machine)
    plan = None
    for spec in ("activation_spill", "recompute"):
        try:
            plan = make(spec, judge).apply(coarse.problem, machine, Plan())
            break
        except Infeasible:
            continue
    assume(plan is not None)
    assert plan is not None
    wide = Simulator(coarse.problem, machine).run(plan)
    fine = check_plan(problem, machine, coarse.expand(plan))
    assert fine.violations == () and fine.timeline is not None
    assert fine.timeline.makespan_us <= wide.makespan_us
    assert fine.timeline.peak_bytes[DEVICE] <= wide.peak_bytes[DEVICE]


def test_pinned_tensors_keep_no_ops_apart():
    problem, _ = pinned_chain(random.Random(5), 6)
    loose = Problem(tuple(replace(t, pinned=False) for t in problem.tensors), problem.ops)
    assert len(coarsen(problem).problem.ops) < len(coarsen(loose).problem.ops)
    for one in (problem, loose):
        machine = link(None, 10.0)
        coarse = coarsen(one)
        peaks = [max(bytes_range(p, machine)) for p in (one, coarse.problem)]
        assert peaks[0] == peaks[1]
