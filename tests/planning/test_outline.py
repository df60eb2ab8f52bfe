"""Outlines of a step: what any machine makes of them, and the searches that begin with them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from outlined import EVERYTHING, LAYERS, OP_US, SAVED, STATES, WEIGHT, machine, training

from offcompile.ir import HOST, Infeasible, Machine, Plan, Problem
from offcompile.outline import StepOutline, outline, outlines
from offcompile.passes.build.schedule import build
from offcompile.passes.joint import Joint
from offcompile.passes.search.program_variant import Choices, hostable
from offcompile.passes.search.starts import OutlinedChoices
from offcompile.planning import planner
from offcompile.planning.planner import check_plan, judge_for, plan_problem
from offcompile.testing import problems_with_machines


def compute_us(problem: Problem) -> float:
    return sum(op.duration_us for op in problem.ops if op.phase != "update")


def made(problem: Problem, on: Machine, may_stay: bool = False) -> StepOutline:
    found = outline(problem, on, may_stay)
    assert found is not None
    return found


@given(problems_with_machines(), st.booleans())
def test_any_problem_has_an_outline_of_lawful_choices_or_none(
    case: tuple[Problem, Machine], may_stay: bool
) -> None:
    problem, on = case
    found = outline(problem, on, may_stay)
    if found is None:
        return
    assert found.choices.hosted <= set(hostable(problem))
    assert found.stays <= {t.id for t in problem.tensors if t.kind == "weight" and t.home == HOST}
    assert may_stay or not found.stays
    assert all(problem.op[op].recompute for op, _ in found.choices.recomputes)
    try:
        plan = build(problem, on, found.choices.decisions(problem))
    except Infeasible:
        return  # choices only: a search evicts what does not fit
    assert not [v for v in check_plan(problem, on, plan).violations if v.kind != "capacity"]


def test_a_step_takes_no_less_than_its_ops_and_more_with_less_memory_or_a_slower_link() -> None:
    problem = training()
    budgets = [EVERYTHING // n for n in (1, 2, 4, 8)]
    costs = [made(problem, machine(nbytes)).cost_us for nbytes in budgets]
    assert costs[0] >= compute_us(problem)
    assert all(less <= more * (1 + 1e-6) for less, more in pairwise(costs))
    slower = made(problem, machine(budgets[2], 10_000.0)).cost_us
    assert slower > costs[2]


def test_a_step_with_an_op_too_large_for_the_device_has_no_outline() -> None:
    assert outline(training(), machine(WEIGHT)) is None


def test_the_host_takes_more_updates_the_slower_the_link() -> None:
    problem, counts = training(), list[int]()
    for rate in (100_000.0, 25_000.0, 5_000.0):
        counts.append(len(made(problem, machine(EVERYTHING // 8, rate)).choices.hosted))
    assert counts[0] < counts[1] < counts[2] == LAYERS


def test_what_is_cheap_runs_again_where_memory_is_short() -> None:
    problem = training()
    assert not made(problem, machine(2 * EVERYTHING)).choices.recomputes
    again = made(problem, machine(LAYERS * SAVED, 5_000.0)).choices.recomputes
    assert len({op for op, _ in again if op.startswith("A")}) >= LAYERS // 3


def test_weights_stay_as_far_as_there_is_room() -> None:
    problem = training(updates=False)
    room = [LAYERS * 2 * SAVED + part * WEIGHT for part in (6, 18, 3 * LAYERS)]
    slow = [machine(nbytes, 3_000.0) for nbytes in room]
    counts = [len(made(problem, on, may_stay=True).stays) for on in slow]
    assert 0 < counts[0] < counts[1] < counts[2] == LAYERS
    assert not made(problem, slow[0]).stays


def test_time_after_the_step_makes_more_weights_stay() -> None:
    problem, on = training(updates=False), machine(LAYERS * 2 * SAVED, 50_000.0)
    without = outline(problem, on, True)
    found = outline(problem, on, True, update_us_per_byte=0.01)
    assert without is not None
    assert found is not None
    assert len(found.stays) > len(without.stays)


def test_outlines_with_more_slack_promise_less() -> None:
    problem, on = training(), machine(EVERYTHING // 5)
    costs = [found.cost_us for found in outlines(problem, on)]
    assert len(costs) > 1
    assert all(less <= more * (1 + 1e-6) for less, more in pairwise(costs))


def test_an_outline_says_which_activations_leave() -> None:
    problem = training(updates=False)
    tight = made(problem, machine(LAYERS * SAVED, 25_000.0)).away
    assert {tensor for tensor, _ in tight} <= {t.id for t in problem.tensors}
    assert all(0 <= share <= 1 for share in tight.values())
    roomy = made(problem, machine(2 * EVERYTHING)).away
    assert sum(roomy.values()) < 0.1 < sum(tight.values())


def large_last(host_us: float, device_bytes: int) -> tuple[Problem, Machine]:
    """The last gradient is of a weight whose update takes the host this long."""
    problem = training()
    ops = [replace(op, host_duration_us=host_us) if op.id == "U0" else op for op in problem.ops]
    return replace(problem, ops=tuple(ops)), machine(device_bytes)


def test_one_side_makes_all_of_a_large_update() -> None:
    problem, on = large_last(20 * OP_US, EVERYTHING // 5)
    even, _ = large_last(5 * OP_US, EVERYTHING // 5)
    # nothing hides the last update on the host: either it takes that long, or its states cross
    after_us = min(20 * OP_US, (STATES + WEIGHT) / 25_000.0)
    assert made(problem, on).cost_us >= compute_us(problem) + 0.9 * after_us
    assert made(problem, on).cost_us >= made(even, on).cost_us - 1e-3


def test_the_choices_alone_make_a_plan_near_the_outline() -> None:
    problem, on = training(), machine(EVERYTHING // 5)
    found, judge = made(problem, on), judge_for(problem, on)
    outlined = OutlinedChoices(found.choices, found.cost_us, found.away)
    plan = Joint(judge=judge, outlines=[outlined], trial=True).apply(problem, on, Plan())
    took = judge(problem, on, plan)
    assert took.valid
    assert took.cost_us <= 1.2 * found.cost_us


def test_a_trial_stops_at_the_plan_of_the_outline() -> None:
    problem, on = training(), machine(EVERYTHING // 5)
    judge, asked = judge_for(problem, on), list[Plan]()

    def counting(p: Problem, m: Machine, plan: Plan):  # type: ignore[no-untyped-def]
        asked.append(plan)
        return judge(p, m, plan)

    trial = Joint(judge=counting, trial=True, seconds=0.5, evaluations=10)
    trial.apply(problem, on, Plan())
    without, asked[:] = len(asked), []
    told = list[StepOutline]()

    def all_outlines() -> Iterator[OutlinedChoices]:
        for found in outlines(problem, on):
            told.append(found)
            yield OutlinedChoices(found.choices, float("inf"), found.away)

    replace(trial, outlines=all_outlines()).apply(problem, on, Plan())
    assert len(asked) < without
    assert len(told) == 1  # its plan is near enough: no other outline is made


@pytest.mark.parametrize("from_ops", [0, 10_000])
def test_only_large_steps_are_outlined(monkeypatch: pytest.MonkeyPatch, from_ops: int) -> None:
    asked = list[Problem]()

    def known(problem: Problem, on: Machine) -> Iterator[StepOutline]:
        asked.append(problem)
        yield StepOutline(Choices(), frozenset(), 0.0)

    monkeypatch.setattr(planner, "outlines", known)
    monkeypatch.setattr(planner, "OUTLINE_FROM_OPS", from_ops)
    problem, on = training(), machine(EVERYTHING // 5)
    plan_problem(problem, on, seconds=0.2)
    assert len(asked) == (from_ops == 0)
