"""Updates split between host and device: the first gradients' weights on the host, others not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from memferry_problems import machine, step

from offcompile.ir import HOST, Machine, Problem
from offcompile.passes.joint import Joint
from offcompile.passes.search.program_variant import hostable
from offcompile.passes.search.update_split import UpdateSplit
from offcompile.planning.planner import certify
from offcompile.simulate import simulate

LAYERS = 12
#: weights from the last layer's to the first's, as their gradients come
ORDER = tuple(f"w{i}" for i in reversed(range(LAYERS)))


def balanced_step() -> tuple[Problem, Machine]:
    """A step whose host updates and whose states' way to the device and back both take long."""
    problem = step([1000] * LAYERS, compute_us=40.0, update_us=2.0, host_update_us=100.0)
    return problem, machine(device=8_000)


def pinned_there(problem: Problem) -> Problem:
    """The same with states that never leave the host."""
    tensors = tuple(
        replace(t, home=HOST, pinned=True) if t.kind == "state" else t for t in problem.tensors
    )
    return replace(problem, tensors=tensors)


def test_weights_are_in_the_order_of_their_gradients() -> None:
    split = UpdateSplit.of(*balanced_step())
    assert split.weights == ORDER and not split.held


def test_a_share_takes_the_first_of_them() -> None:
    split = UpdateSplit.of(*balanced_step())
    assert split.hosted(0.0) == frozenset()
    assert split.hosted(0.25) == set(ORDER[: LAYERS // 4])
    assert split.hosted(1.0) == set(ORDER)
    shares = [split.hosted(n / 20) for n in range(21)]
    assert all(a <= b for a, b in pairwise(shares))
    assert split.share(split.hosted(0.25)) == pytest.approx(0.25)


def test_what_only_the_host_can_update_is_in_every_split() -> None:
    problem, where = balanced_step()
    problem = pinned_there(problem)
    split = UpdateSplit.of(problem, where)
    assert split.weights == () and split.hosted(0.0) == set(hostable(problem))


@pytest.mark.parametrize("best", [0.0, 0.3, 0.62, 1.0])
def test_the_search_comes_near_the_cheapest_share(best: float) -> None:
    split = UpdateSplit.of(*balanced_step())
    tried: list[float] = []

    def cost_of(hosted: frozenset[str]) -> float:
        tried.append(split.share(hosted))
        return abs(tried[-1] - best)

    found = split.search(cost_of, lambda: False)
    assert found is not None and abs(found - best) <= 0.1
    assert len(tried) == len(set(tried)) <= 9


def test_the_search_stops_when_it_is_told_to() -> None:
    split = UpdateSplit.of(*balanced_step())
    tried: list[frozenset[str]] = []
    split.search(lambda hosted: tried.append(hosted), lambda: len(tried) >= 2)
    assert len(tried) == 2


def test_around_a_share_only_its_neighbours_are_tried() -> None:
    split = UpdateSplit.of(*balanced_step())
    tried: list[float] = []
    split.search(lambda h: tried.append(split.share(h)) or 1.0, lambda: False, around=0.5)
    assert tried and all(0.2 <= share <= 0.8 for share in tried)


def planned_us(problem: Problem, where: Machine) -> tuple[float, int]:
    plan = Joint(judge=simulate, evaluations=60, seconds=600.0).apply(problem, where, None)
    return certify(problem, where, plan, "joint").makespan_us, len(plan.updates)


def test_joint_splits_where_neither_side_is_quick_enough() -> None:
    problem, where = balanced_step()
    split_us, hosted = planned_us(problem, where)
    host_us, all_of_them = planned_us(pinned_there(problem), where)
    assert all_of_them == LAYERS and 0 < hosted < LAYERS
    assert split_us < 0.9 * host_us
