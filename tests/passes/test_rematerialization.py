"""Recomputation in backward: cheapest for its price, in blocks, and just in time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations

import pytest
from chains import link
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import DEVICE, Machine, Op, Plan, Problem, Recompute, Tensor, Tier
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.recompute import Recomputation
from offcompile.passes.search.recompute_starts import Recipe, RecomputeStarts, recipes_of
from offcompile.passes.select.min_cut import UNCUTTABLE, Network
from offcompile.passes.select.pressure import pressure
from offcompile.passes.select.rematerialization import Rematerialization
from offcompile.planning.planner import judge_for, plan_problem

BLOCKS, NARROW, WIDE = 6, 100, 1000
Edge = tuple[int, int, int]


def blocks(count: int = BLOCKS, attention_again: bool = True) -> Problem:
    """Each block widens what comes in, applies something cheap, attends, and narrows it again.

    Backward needs what came in, what was wide and what attention made.
    """
    tensors = [Tensor("x", NARROW, "input", DEVICE)]
    ops = []
    for i in range(count):
        into = f"r{i - 1}" if i else "x"
        tensors += [Tensor(f"{t}{i}", WIDE, "activation") for t in ("wide", "bent", "seen")]
        tensors.append(Tensor(f"r{i}", NARROW, "activation"))
        ops += [
            Op(f"widen{i}", "forward", 10, (into,), (f"wide{i}",), recompute=True),
            Op(f"bend{i}", "forward", 1, (f"wide{i}",), (f"bent{i}",), recompute=True),
            Op(f"see{i}", "forward", 30, (f"bent{i}",), (f"seen{i}",), recompute=attention_again),
            Op(f"narrow{i}", "forward", 10, (f"seen{i}", into), (f"r{i}",), recompute=True),
        ]
    for i in reversed(range(count)):
        into = f"r{i - 1}" if i else "x"
        reads = (f"seen{i}", f"bent{i}", f"wide{i}", into)
        ops.append(Op(f"back{i}", "backward", 60, reads, ()))
    return Problem(tuple(tensors), tuple(ops))


def reruns(problem: Problem, price: float, parts: int = BLOCKS) -> dict[str, str]:
    """Op → before which it runs again."""
    choices = Rematerialization(problem)
    nbytes = problem.tensor
    found = choices.reruns(lambda t: price * nbytes[t].nbytes, choices.boundaries(parts))
    assert len(dict(found)) == len(found)
    return dict(found)


def test_low_prices_make_only_again_what_is_nearly_free() -> None:
    again = reruns(blocks(), price=2.0)
    assert again == {f"bend{i}": f"back{i}" for i in range(BLOCKS)}


def test_high_prices_leave_what_enters_a_block_and_run_it_again_just_before_its_backward() -> None:
    again = reruns(blocks(), price=1e6)
    whole = {f"{op}{i}": f"back{i}" for i in range(BLOCKS) for op in ("widen", "bend", "see")}
    assert again == whole


def test_an_op_that_may_not_run_again_ends_the_chain() -> None:
    again = reruns(blocks(attention_again=False), price=1e6)
    assert again.keys() == {f"{op}{i}" for i in range(BLOCKS) for op in ("widen", "bend")}


def test_without_boundaries_one_chain_leads_back_to_the_first_op() -> None:
    again = reruns(blocks(), price=1e6, parts=1)
    assert again["narrow0"] == again["widen0"] == f"back{BLOCKS - 1}"


def test_boundaries_lie_where_the_fewest_bytes_cross() -> None:
    found = Rematerialization(blocks()).boundaries(BLOCKS)
    assert found == {f"r{i}" for i in range(BLOCKS - 1)}


def test_what_is_overwritten_before_backward_is_no_operand_to_run_again_from() -> None:
    problem = blocks()
    spoil = Op("spoil", "update", 1, ("r1",), ("r1",))
    at = problem.op_index["back5"]
    ops = (*problem.ops[:at], spoil, *problem.ops[at:])
    again = reruns(replace(problem, ops=ops), price=1e6)
    assert "widen2" not in again and "widen3" in again


def test_a_price_of_nothing_keeps_everything() -> None:
    assert reruns(blocks(), price=0.0) == {}


# --- policies ---------------------------------------------------------------------------------


def peak(problem: Problem, again: Iterable[tuple[str, str]]) -> int:
    decided = Decisions(recomputes=tuple(Recompute(*r) for r in sorted(again)))
    return max(pressure(problem, decided).kept_bytes)


def test_the_policy_finds_checkpointing_of_blocks_by_itself() -> None:
    problem = blocks(12)
    classical = reruns(problem, price=1e6, parts=12)
    most = peak(problem, classical.items())
    assert most < peak(problem, ()) / 3
    machine = Machine((Tier(DEVICE, most),))
    plan = Recomputation(judge=judge_for(problem, machine)).apply(problem, machine, Plan())
    added = sum(problem.op[r.op].duration_us for r in plan.recomputes)
    assert added <= sum(problem.op[op].duration_us for op in classical)


@pytest.mark.parametrize(
    ("share", "bytes_per_us"),
    [
        (0.5, 200.0),
        *(
            pytest.param(*p, marks=pytest.mark.soak)
            for p in ((0.3, 20.0), (0.3, 2.0), (0.5, 20.0), (0.75, 2.0))
        ),
    ],
)
def test_joint_is_never_behind_running_blocks_again(share: float, bytes_per_us: float) -> None:
    problem = blocks(12)
    machine = link(int(share * peak(problem, ())), bytes_per_us)
    plain_us = sum(op.duration_us for op in problem.ops)
    again = reruns(problem, price=1e6, parts=12)
    checkpointed_us = plain_us + sum(problem.op[op].duration_us for op in again)
    fits = peak(problem, again.items()) <= machine.tier[DEVICE].capacity_bytes
    result = plan_problem(problem, machine, "joint", seconds=3)
    assert not fits or result.makespan_us <= checkpointed_us


def test_recipes_are_tried_once_and_the_best_is_kept() -> None:
    problem, tried = blocks(), []

    def cost_of(again: frozenset[tuple[str, str]]) -> float:
        tried.append(again)
        return float(abs(len(again) - BLOCKS))  # the cheap op of each block, and nothing else

    starts = RecomputeStarts(problem, cost_of, lambda: False)
    starts.run()
    assert len(tried) == len(set(tried)) and starts.best_cost == 0
    assert starts.best is not None and len(starts.reruns(starts.best)) == BLOCKS


def test_early_layers_may_keep_and_the_last_ones_stay() -> None:
    starts = RecomputeStarts(blocks(), lambda again: 0.0, lambda: False)
    again = dict(starts.reruns(Recipe(BLOCKS, 1e6, early_price=0.0, early=0.5, late=0.8)))
    assert {int(op[-1]) for op in again} == {3, 4}


def test_whole_forward_recipes_differ() -> None:
    found = list(recipes_of(blocks()))
    assert len(found) == len(set(found)) > 1


# --- the cut ------------------------------------------------------------------------------------

SIZE = 5


def cost(edges: list[Edge], with_source: set[int]) -> int:
    return sum(c for a, b, c in edges if a in with_source and b not in with_source)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, SIZE - 1), st.integers(1, SIZE), st.integers(0, 9)), max_size=14
    )
)
def test_a_cut_is_the_cheapest_of_all(edges: list[Edge]) -> None:
    """Node 0 is the source, the last one the sink."""
    network = Network()
    for a, b, capacity in edges:
        if a == 0 and b == SIZE:
            continue
        if a == 0:
            network.from_source(b, capacity)
        elif b == SIZE:
            network.to_sink(a, capacity)
        else:
            network.edge(a, b, capacity)
    inner = range(1, SIZE)
    kept = [e for e in edges if (e[0], e[1]) != (0, SIZE)]
    sides = [{0, *some} for n in range(SIZE) for some in combinations(inner, n)]
    found = {0, *(n for n in network.source_side() if isinstance(n, int))}
    assert cost(kept, found) == min(cost(kept, side) for side in sides)


def test_an_edge_that_may_not_be_cut_is_not() -> None:
    network = Network()
    network.from_source("a", UNCUTTABLE)
    network.edge("a", "b", UNCUTTABLE)
    network.to_sink("b", 10**15)
    assert network.source_side() == {"a", "b"}
