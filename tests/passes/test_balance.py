"""Loads that hold a step up are made direct, as many as leave lane and compute equally busy."""

from __future__ import annotations

from itertools import pairwise

import pytest
from chains import link

from offcompile.ir import Op, Problem, Tensor
from offcompile.passes.build.schedule import Builder
from offcompile.passes.search.balance import balanced
from offcompile.passes.search.program_variant import Choices, ProgramVariant
from offcompile.passes.search.search import SearchState
from offcompile.planning.planner import judge_for, plan_problem
from offcompile.simulate import simulate

READS, NBYTES, RATE = 40, 300, 10.0


def streaming(direct_us: float) -> Problem:
    """Each op reads a weight of its own: 10 µs of compute and 30 of the lane."""
    weights = tuple(Tensor(f"w{i}", NBYTES, "weight", "host") for i in range(READS))
    ops = [
        Op(f"F{i}", "forward", 10, (f"w{i}",), (), direct={f"w{i}": direct_us})
        for i in range(READS)
    ]
    return Problem(weights, tuple(ops))


def made_direct(problem: Problem, room: int) -> list[tuple[str, str]]:
    """The reads that `balanced` makes direct in a step that loads everything."""
    machine = link(room, RATE)
    variant = ProgramVariant(problem, machine, Choices())
    cover = variant.cover(set())
    plan = Builder(problem, machine, variant.decisions(cover)).best(judge_for(problem, machine))
    timeline = simulate(problem, machine, plan)
    made = balanced(SearchState(variant, cover, plan, timeline, timeline.makespan_us))
    return [] if made is None else sorted(made[0].choices.directs)


def test_as_many_as_leave_both_equally_busy() -> None:
    """1200 µs of lane, 400 of compute; each read made direct takes 30 from one and adds 20."""
    problem = streaming(30)
    directs = made_direct(problem, 4 * NBYTES)
    assert len(directs) == 16
    places = sorted(int(op[1:]) for op, _ in directs)
    assert all(1 <= b - a <= 4 for a, b in pairwise(places))
    result = plan_problem(problem, link(4 * NBYTES, RATE), seconds=1)
    assert result.makespan_us == pytest.approx(720, rel=0.06)


def test_the_cheapest_come_first() -> None:
    """Two reads cost nothing more; they are taken before any other."""
    problem = streaming(60)
    cheap = tuple(
        Op(o.id, o.phase, 10, o.reads, (), direct={o.reads[0]: 10.5}) if o.id in ("F3", "F9") else o
        for o in problem.ops
    )
    directs = made_direct(Problem(problem.tensors, cheap), 4 * NBYTES)
    assert {("F3", "w3"), ("F9", "w9")} < set(directs)


def test_nothing_changes_where_compute_takes_longer() -> None:
    problem = streaming(12)
    slow = tuple(Op(o.id, o.phase, 40, o.reads, (), direct={o.reads[0]: 45.0}) for o in problem.ops)
    assert made_direct(Problem(problem.tensors, slow), 4 * NBYTES) == []
