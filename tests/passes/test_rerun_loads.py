"""Loads given up for recomputation: what is made again, and what that gains near the floor."""

from __future__ import annotations

import pytest
from chains import link

from offcompile.ir import DEVICE, Machine, Op, Plan, Problem, Tensor
from offcompile.passes.registry import make
from offcompile.passes.search import starts
from offcompile.passes.search.program_variant import Choices, ProgramVariant
from offcompile.passes.search.rerun_loads import rerun_variants
from offcompile.passes.search.search import Search, SearchState
from offcompile.passes.select.gap_set import Prices
from offcompile.passes.select.rematerialization import Rematerialization
from offcompile.planning.planner import certify, judge_for

SIZE, LAYERS = 100, 6
#: a tensor crosses in 20 µs, and is made from the one before in 2
SLOW = link(550, 5.0)


def stage(layers: int = LAYERS, repeatable: bool = True) -> Problem:
    """Quick layers, each of which backward reads with the one before and much workspace."""
    tensors = [Tensor("y0", SIZE, "input", DEVICE, pinned=True)]
    ops: list[Op] = []
    for i in range(1, layers + 1):
        tensors.append(Tensor(f"y{i}", SIZE, "activation"))
        made = Op(f"f{i}", "forward", 2.0, (f"y{i - 1}",), (f"y{i}",), recompute=repeatable)
        ops.append(made)
    for i in reversed(range(1, layers + 1)):
        read = (f"y{i}", f"y{i - 1}")
        ops.append(Op(f"b{i}", "backward", 10.0, read, (), workspace_bytes=150))
    return Problem(tuple(tensors), tuple(ops))


def all_away(problem: Problem, machine: Machine) -> SearchState:
    """The plan in which whatever has to leave crosses the link."""
    judge = judge_for(problem, machine)
    search = Search(problem, machine, judge, 100, float("inf"), 0.0)
    variant = ProgramVariant(problem, machine, Choices())
    cover = variant.cover(set())
    assert cover.repair(variant.capacity, Prices())
    state = search.evaluate(variant, cover)
    assert state is not None
    return state


def test_a_tensor_is_made_again_from_what_is_there() -> None:
    problem = stage()
    start = all_away(problem, SLOW)
    variant, cover = next(iter(rerun_variants(start, Rematerialization(problem))))
    assert variant.choices.recomputes and len(cover.away) < len(start.cover.away)
    for op, before in variant.choices.recomputes:
        layer = int(op.removeprefix("f"))
        # backward of a layer reads its result and the one before, or a chain leads to these
        assert layer <= int(before.removeprefix("b"))
    judge = judge_for(problem, SLOW)
    found = Search(problem, SLOW, judge, 9, float("inf"), 0.0).evaluate(variant, cover)
    assert found is not None and found.us < start.us


def test_an_op_may_run_more_than_twice() -> None:
    problem = stage()
    machine = link(460, 5.0)
    judge = judge_for(problem, machine)
    plan = make("joint:evaluations=200,seconds=60", judge).apply(problem, machine, Plan())
    certify(problem, machine, plan, "joint")
    runs = [r.op for r in plan.recomputes]
    assert max(map(runs.count, runs)) >= 2


def test_what_must_not_run_again_is_loaded() -> None:
    start = all_away(stage(repeatable=False), SLOW)
    assert not list(rerun_variants(start, Rematerialization(start.variant.problem)))


def test_near_the_floor_it_beats_running_each_op_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, machine = stage(12), link(460, 5.0)
    judge = judge_for(problem, machine)

    def planned_us() -> float:
        made = make("joint:evaluations=60,seconds=60", judge).apply(problem, machine, Plan())
        return judge(problem, machine, made).makespan_us

    found_us = planned_us()
    monkeypatch.setattr(starts, "rerun_variants", lambda *_: ())
    assert found_us <= planned_us()
