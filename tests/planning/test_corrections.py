"""Costs put right by measured steps, on made-up times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_report import MACHINE, PROBLEM, made

from offcompile.ir import COMPUTE, Infeasible, Op, Plan, Problem, Recompute, Start, Tensor
from offcompile.planning.feedback.corrections import (
    SAME,
    Factors,
    corrected,
    factors_of,
    with_factors,
)
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.planning.feedback.profiling import reconsider
from offcompile.planning.feedback.sparsity import Packability
from offcompile.planning.fit_budget import Decided
from offcompile.planning.planner import certify

US = 1000
WAIT = MeasuredWait("bc", "m", 4000 * US, 700 * US)

#: b is made again before backward
SMALL = Problem(
    (
        Tensor("x", 64, "input", "device", pinned=True),
        Tensor("a", 64, "activation"),
        Tensor("b", 64, "activation"),
        Tensor("y", 64, "output"),
    ),
    (
        Op("fa", "forward", 100.0, ("x",), ("a",)),
        Op("fb", "forward", 300.0, ("a",), ("b",), recompute=True),
        Op("ba", "backward", 500.0, ("b",), ("y",)),
    ),
)
AGAIN = Plan(start=(Start("x", "device"),), recomputes=(Recompute("fb", "ba"),))
KEPT = replace(AGAIN, recomputes=())


def step(forward_us: float, backward_us: float | None, *waits: MeasuredWait) -> MeasuredStep:
    middle = round(forward_us * US)
    spans = [MeasuredSpan("forward", COMPUTE, 0, middle), MeasuredSpan("m", "h2d", 0, 5)]
    end = middle
    if backward_us is not None:
        end += round(backward_us * US)
        spans.append(MeasuredSpan("backward", COMPUTE, middle, end))
    return MeasuredStep(tuple(spans), waits, end)


def test_each_half_has_its_factor_and_waits_are_not_computing() -> None:
    timeline = certify(SMALL, MACHINE, KEPT, "me")
    wait = replace(WAIT, start_ns=900 * US, duration_ns=200 * US)
    found = factors_of(SMALL, KEPT, timeline, step(800.0, 450.0, wait))
    assert found == Factors(pytest.approx(2.0), pytest.approx(0.5))
    early = replace(wait, start_ns=100 * US)
    found = factors_of(SMALL, KEPT, timeline, step(800.0, 450.0, early))
    assert found == Factors(pytest.approx(1.5), pytest.approx(0.9))


def test_a_graph_without_backward_has_one_factor_for_all() -> None:
    timeline = certify(SMALL, MACHINE, KEPT, "me")
    assert factors_of(SMALL, KEPT, timeline, step(1200.0, None)) == Factors(3.0, 3.0)
    assert factors_of(SMALL, KEPT, timeline, MeasuredStep((), (), 0)) is None
    assert factors_of(SMALL, KEPT, timeline, step(0.0, 0.0)) is None


def test_the_problem_s_ops_take_so_many_times_as_long() -> None:
    found = with_factors(PROBLEM, Factors(2.0, 3.0))
    assert [op.duration_us for op in found.ops] == [200.0, 200.0, 2000.0, 4000.0, 1500.0, 1500.0]
    assert found.op["fd"].direct == {"w": 5000.0}
    assert found.tensors == PROBLEM.tensors
    assert with_factors(PROBLEM, None) is PROBLEM


@pytest.mark.parametrize("factors", [Factors(2.0, 3.0), Factors(0.5, 0.25), Factors(1.0, 1.0)])
def test_what_is_measured_as_planned_under_factors_gives_these_factors(factors: Factors) -> None:
    """Also where backward runs something of forward again."""
    for plan in (AGAIN, KEPT):
        timeline = certify(SMALL, MACHINE, plan, "me")
        again_us = 300.0 * factors.forward if plan.recomputes else 0.0
        seen = step(400.0 * factors.forward, 500.0 * factors.backward + again_us)
        found = factors_of(SMALL, plan, timeline, seen)
        assert found is not None
        assert (found.forward, found.backward) == pytest.approx((factors.forward, factors.backward))
        again = corrected(SMALL, MACHINE, plan, found)
        assert again is not None and again.step_us == pytest.approx(seen.step_ns / US)


def test_backward_that_is_shorter_than_what_it_runs_again_counts_as_a_whole() -> None:
    timeline = certify(SMALL, MACHINE, AGAIN, "me")
    found = factors_of(SMALL, AGAIN, timeline, step(4000.0, 800.0))
    assert found == Factors(10.0, pytest.approx(1.0))


def test_noise_is_no_difference() -> None:
    assert Factors(SAME, 1 / SAME).same
    assert not Factors(SAME + 0.01, 1.0).same
    assert not Factors(1.0, 1 / SAME - 0.01).same
    assert Factors(2.0, 0.5).words() == "forward takes 2.00 × its costs, backward 0.50 ×"


def test_a_plan_that_cannot_go_on_has_no_corrected_step() -> None:
    report = made()
    none = report.machine.with_capacity("device", 1)
    assert corrected(report.problem, none, report.plan, Factors()) is None


def test_a_plan_stays_where_none_is_found_for_what_was_seen() -> None:
    report = made()
    assert report.planned_us > 1.2 * sum(op.duration_us for op in report.problem.ops)

    def none(problem: Problem, worth_us: float, shortly: bool) -> Decided:
        raise Infeasible("planted", None, "")

    facts = Packability({}, {}, None)
    text, found = reconsider(
        report.problem, report.plan, report.machine, facts, 0.03, none, "costs"
    )
    assert found is None and text == "no plan was found for these costs: the plan stays"
