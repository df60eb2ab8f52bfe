"""How many states of an optimizer a plan keeps on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest

from offcompile.ir import Infeasible
from offcompile.run.plan.candidates import Candidate
from offcompile.run.plan.contract import FreeStates, PlanRequest
from offcompile.run.plan.free_states import with_states
from offcompile.run.plan.planner import GraphPlanner

#: host and link of the made-up machine update so many bytes of states per µs together
BYTES_PER_US = 75_000
COMPUTE_US = 1_000.0


@dataclass(frozen=True)
class _Source:
    target: Any


def _chosen(step_us: Mapping[float, float | None], states_us: float) -> tuple[float, list[float]]:
    """The share kept, and those planned for. step_us: share → its plan's step; None: no plan.
    states_us: what updates of all states take beside the device."""
    shares, planned = list[float](), list[float]()

    def keep(share: float) -> int:
        shares.append(share)
        return int(100 * share)

    def plan(planner: GraphPlanner) -> Candidate:
        assert planner.request.held_bytes == int(100 * shares[-1])
        planned.append(shares[-1])
        cost_us = step_us[shares[-1]]
        if cost_us is None:
            raise Infeasible("too small", 1, "give more")
        ops = [SimpleNamespace(duration_us=COMPUTE_US)]
        choice = SimpleNamespace(
            annotated=SimpleNamespace(problem=SimpleNamespace(ops=ops)),
            decided=SimpleNamespace(cost_us=cost_us),
        )
        return cast(Candidate, SimpleNamespace(choice=choice))

    profile = SimpleNamespace(host_adam_gbps=50.0, h2d_both_gbps=None, h2d_gbps=50.0)
    source: Any = _Source(SimpleNamespace(profile=profile))
    states = FreeStates(int(states_us * BYTES_PER_US), keep)
    found, _ = with_states(GraphPlanner(source, PlanRequest("graph", states=states)), plan)
    assert found.request.states is None and found.request.held_bytes == int(100 * shares[-1])
    return shares[-1], planned


def test_states_stay_where_that_costs_little_and_nothing_else_is_planned() -> None:
    assert _chosen({1.0: 1_080.0}, 500.0) == (1.0, [1.0])


def test_states_leave_where_their_room_is_worth_more_than_their_updates() -> None:
    steps = {1.0: 1_900.0, 0.5: 1_300.0, 0.0: 1_250.0}
    assert _chosen(steps, 400.0) == (0.5, [1.0, 0.5, 0.0])
    assert _chosen(steps, 40.0) == (0.0, [1.0, 0.5, 0.0])


def test_shares_that_cannot_be_better_are_not_planned() -> None:
    assert _chosen({1.0: 1_300.0}, 2_000.0) == (1.0, [1.0])


def test_as_many_stay_as_there_is_room_for() -> None:
    assert _chosen({1.0: None, 0.5: 1_050.0}, 10.0) == (0.5, [1.0, 0.5])
    assert _chosen({1.0: None, 0.5: None, 0.0: 3_000.0}, 10.0) == (0.0, [1.0, 0.5, 0.0])


def test_a_refusal_is_that_of_no_states_on_the_device() -> None:
    with pytest.raises(Infeasible):
        _chosen({1.0: None, 0.5: None, 0.0: None}, 10.0)
