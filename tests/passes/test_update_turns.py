"""Host and device take turns with the updates of a step that waits for its links."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from memferry_problems import machine, step

from offcompile.ir import HOST, Machine, Problem
from offcompile.passes.search.program_variant import Choices, ProgramVariant
from offcompile.passes.search.search import Search, SearchState
from offcompile.passes.search.update_split import UpdateSplit
from offcompile.passes.search.update_turns import FEWER, taking_turns
from offcompile.passes.select.gap_set import GapSet, Prices
from offcompile.planning.planner import certify, judge_for

LAYERS, UNIT = 16, 1000


def streamed_step() -> tuple[Problem, Machine]:
    """A step that updates each weight right after its gradient; moving states takes longest."""
    made = step(
        [UNIT] * LAYERS,
        steady=False,
        compute_us=10.0,
        update_us=1.0,
        host_update_us=130.0,
    )
    sizes = {"state": 6 * UNIT}
    tensors = tuple(replace(t, nbytes=sizes.get(t.kind, t.nbytes)) for t in made.tensors)
    forward = [op for op in made.ops if op.phase == "forward"]
    backward = [op for op in made.ops if op.phase == "backward"]
    ops = [*forward]
    for op in backward:
        ops += [op, made.op[f"U{op.id[1:]}"]]
    ops = [replace(op, direct={}) for op in ops]
    return Problem(tensors, tuple(ops), False), machine(device=10 * UNIT)


def search_of(problem: Problem, where: Machine, floor_us: float = 0.0) -> Search:
    judge = judge_for(problem, where)
    return Search(problem, where, judge, 100, time.thread_time() + 600.0, floor_us)


def with_first_on_host(search: Search, split: UpdateSplit, share: float) -> SearchState:
    choices = Choices(hosted=split.hosted(share))
    variant = ProgramVariant(search.problem, search.machine, choices)
    cover = GapSet(variant.gaps)
    assert cover.repair(variant.capacity, Prices())
    state = search.evaluate(variant, cover, rounds=0)
    assert state is not None
    return state


def test_turns_are_spread_over_all_gradients() -> None:
    split = UpdateSplit.of(*streamed_step())
    hosted = split.alternating(0.5)
    assert [w in hosted for w in split.weights] in (
        [i % 2 == 0 for i in range(LAYERS)],
        [i % 2 == 1 for i in range(LAYERS)],
    )
    for n in range(-1, 22):
        found = split.alternating(n / 20)
        assert split.share(found) == pytest.approx(min(1.0, max(0.0, n / 20)), abs=1 / LAYERS)
    assert split.alternating(0.0) == frozenset()
    assert split.alternating(1.0) == set(split.weights)


def test_what_only_the_host_can_update_keeps_its_side() -> None:
    problem, where = streamed_step()
    tensors = tuple(
        replace(t, home=HOST, pinned=True) if t.id == "s3" else t for t in problem.tensors
    )
    split = UpdateSplit.of(replace(problem, tensors=tensors), where)
    assert split.held == {"w3"} and "w3" in split.alternating(0.0)


def test_turns_beat_any_share_of_first_gradients_where_links_are_slow() -> None:
    problem, where = streamed_step()
    split, search = UpdateSplit.of(problem, where), search_of(problem, where)
    first = [with_first_on_host(search, split, n / LAYERS) for n in range(LAYERS + 1)]
    left = search.left
    found = taking_turns(search, split, first)
    best = min(first, key=lambda s: s.cost)
    assert len(found) == 1 and found[0].us < best.us
    assert search.left == left  # the plans tried here shorten no later search
    assert search.best_us == found[0].us
    assert certify(problem, where, found[0].plan, "turns").makespan_us == found[0].us
    hosted = found[0].variant.choices.hosted
    assert split.share(hosted) <= split.share(best.variant.choices.hosted) + FEWER


def test_nothing_is_tried_where_links_hold_nothing_up() -> None:
    problem, where = streamed_step()
    split, search = UpdateSplit.of(problem, where), search_of(problem, where)
    state = with_first_on_host(search, split, 0.5)
    search.floor_us = state.us * 0.99  # as good as its bound
    assert taking_turns(search, split, [state]) == []
    slow = replace(
        problem, ops=tuple(replace(op, duration_us=20 * op.duration_us) for op in problem.ops)
    )
    busy, search = UpdateSplit.of(slow, where), search_of(slow, where)
    state = with_first_on_host(search, busy, 1.0)
    assert taking_turns(search, busy, [state]) == []
    assert taking_turns(search, busy, []) == []
