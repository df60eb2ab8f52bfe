"""Quick ways to know what a step holds: the same as the long ones."""

from __future__ import annotations

import random
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import Infeasible, Machine, Problem, Recompute
from offcompile.passes.build import required_copies as residency
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.passes.build.program import Program
from offcompile.passes.search.program_variant import direct_choices
from offcompile.passes.select.footprint import footprint, order_of
from offcompile.passes.select.pressure import pressure
from offcompile.testing import problems_with_machines

Rerun = tuple[str, str]


def reruns_of(problem: Problem, seed: int) -> list[Rerun]:
    """Some ops that may run again, each before some later reader of what it makes."""
    dice, found = random.Random(seed), []
    for i, op in enumerate(problem.ops):
        readers = [o.id for o in problem.ops[i + 1 :] if not set(o.reads).isdisjoint(op.writes)]
        if op.recompute and readers and dice.random() < 0.5:
            found.append((op.id, dice.choice(readers)))
    return found


@settings(max_examples=120, deadline=None)
@given(problems_with_machines(), st.integers(0, 9))
def test_bytes_added_up_are_those_of_planned_copies(
    drawn: tuple[Problem, Machine], seed: int
) -> None:
    problem, _ = drawn
    reruns = reruns_of(problem, seed)
    again = Decisions(recomputes=tuple(Recompute(*r) for r in sorted(reruns)))
    try:
        state = pressure(problem, again)
    except Infeasible:
        return
    assert footprint(problem, reruns) == list(state.kept_bytes)
    assert [problem.ops[i].id for i in order_of(problem, reruns)] == [
        run.op.id for run in state.program.runs
    ]


@settings(max_examples=120, deadline=None)
@given(problems_with_machines(), st.integers(0, 9))
def test_tensors_that_stay_are_seen_to_stay(drawn: tuple[Problem, Machine], seed: int) -> None:
    problem, machine = drawn
    dice = random.Random(seed)
    again = tuple(Recompute(*r) for r in sorted(reruns_of(problem, seed)))
    directs = direct_choices(problem, machine).decisions(problem).directs if seed % 2 else ()
    decisions = Decisions(directs=directs, recomputes=again)
    program = Program(problem, decisions)
    away = tuple(
        Away(t.id, accesses[i].name)
        for t in problem.tensors
        if len(accesses := program.accesses[t.id]) > 1 and not t.pinned and dice.random() < 0.3
        for i in range(len(accesses) - 1)
        if accesses[i + 1].reads
    )
    decisions = Decisions(away=away, directs=directs, recomputes=again)
    try:
        quick = residency.plan_residency(program, decisions)
    except Infeasible:
        return
    with mock.patch.object(residency, "_stays_all_along", lambda *_: False):
        assert residency.plan_residency(program, decisions) == quick
