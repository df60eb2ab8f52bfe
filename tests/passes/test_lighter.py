"""Graphs that save less for backward: the ways of one graph, and steps in which it does."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_step import machine, recorded

from offcompile.ir import InvalidInput, Op, Plan, Problem, Recompute, Tensor
from offcompile.ir.verify import check_structure, check_timeline
from offcompile.passes.registry import make
from offcompile.passes.step.lighter import Lighter, lightened
from offcompile.passes.step.record import TensorKey
from offcompile.passes.step.stitch import stitch
from offcompile.passes.turnover import lighter_ways, reruns_at, saved_with
from offcompile.simulate import Simulator
from offcompile.testing import problems_with_machines

AMPLE = machine(10_000)


def block(gelu_us: float = 2.0, mm_us: float = 500.0) -> Problem:
    """y = down(gelu(up(x))), whose backward reads x, up and gelu."""
    tensors = (
        Tensor("x", 100, "input", "device"),
        *(Tensor(t, 400, "activation") for t in ("up", "gelu")),
        Tensor("y", 100, "output"),
        *(Tensor(t, 400, "activation") for t in ("d gelu", "d up")),
        Tensor("d x", 100, "output"),
    )
    ops = (
        Op("up", "forward", mm_us, ("x",), ("up",), recompute=True),
        Op("gelu", "forward", gelu_us, ("up",), ("gelu",), recompute=True),
        Op("down", "forward", mm_us, ("gelu",), ("y",)),
        Op("d down", "backward", mm_us, ("gelu",), ("d gelu",)),
        Op("d act", "backward", gelu_us, ("up", "d gelu"), ("d up",)),
        Op("d in", "backward", mm_us, ("x", "d up"), ("d x",)),
    )
    return Problem(tensors, ops)


def test_the_ways_of_a_graph_begin_with_what_is_almost_free() -> None:
    first, last = lighter_ways(block(), AMPLE)
    assert [name for name, _ in first.saved] == ["up"]
    assert (first.saved_bytes, first.added_us, first.more_bytes) == (400, 2.0, 0)
    assert (last.saved_bytes, last.added_us) == (0, 502.0)
    assert first.ns_per_byte < last.ns_per_byte


def test_a_way_that_saves_no_less_is_none() -> None:
    dear = block(gelu_us=1e6, mm_us=1e6)
    assert lighter_ways(dear, AMPLE) == ()
    assert lighter_ways(block(), replace(AMPLE, lanes=())) == ()


def test_the_price_decides_which_ops_run_again() -> None:
    problem = block()
    assert reruns_at(problem, 0.0) == ()
    assert {t.id for t in saved_with(problem, ())} == {"up", "gelu"}
    way = lighter_ways(problem, AMPLE)[0]
    plan = make(f"turnover:ns_per_byte={way.ns_per_byte!r}").apply(problem, AMPLE, Plan())
    assert plan.recomputes == (Recompute("gelu", "d down"),)
    assert {(m.tensor, m.ready_before) for m in plan.moves if m.target == "device"} == {
        ("up", "gelu@d down")
    }


@pytest.mark.parametrize("price", [-1.0, math.inf, math.nan])
def test_a_price_is_a_number_from_0_on(price: float) -> None:
    with pytest.raises(InvalidInput, match="ns_per_byte"):
        make(f"turnover:ns_per_byte={price}")


@given(case=problems_with_machines(), price=st.sampled_from([0.01, 0.3, 1.0, 10.0, 1000.0]))
@settings(max_examples=150)
def test_plans_with_a_price_are_lawful_and_move_what_is_saved(case, price) -> None:  # type: ignore[no-untyped-def]
    problem, on = case
    ample = replace(on, tiers=tuple(replace(t, capacity_bytes=None) for t in on.tiers))
    assume(Simulator(problem, ample).run(make("turnover").apply(problem, ample, Plan())).valid)
    plan = make(f"turnover:ns_per_byte={price}").apply(problem, ample, Plan())
    assert check_structure(problem, ample, plan) == ()
    timeline = Simulator(problem, ample).run(plan)
    assert timeline.valid
    assert check_timeline(problem, ample, plan, timeline) == ()
    if problem.steady:
        return
    saved = {t.id for t in saved_with(problem, reruns_at(problem, price))}
    moved = {m.tensor for m in plan.moves}
    assert moved in (saved, set())  # nothing, if the machine has no lanes there and back


def test_a_lightened_step_saves_less_and_takes_longer_in_backward() -> None:
    step = recorded([50, 40, 30])
    way = Lighter(0.5, (("t1", 10),), 7.0, 3)
    lighter = lightened(step, {1: way})
    assert [len(run.saved) for run in lighter.executions] == [2, 1, 2, 0, 0, 0]
    assert lighter.executions[4].read == (TensorKey(1, 0),)
    assert lighter.executions[3].read == step.executions[3].read
    longer = [
        b.duration_us - a.duration_us for a, b in zip(step.measured, lighter.measured, strict=True)
    ]
    assert longer == [0, 0, 0, 0, 7.0, 0]
    assert lighter.measured[4].room_bytes == step.measured[4].room_bytes - 3
    assert sum(t.nbytes for t in stitch(lighter).problem.tensors) == 3 * 40 - 30
    assert lightened(step, {}) == step
