"""The room that a plan leaves to holes is enough if its tensors would do with less."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offcompile.ir import Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.planning.fit_budget import PlanSearch, fit_budget
from offcompile.run.plan.contract import PlanRequest
from offcompile.run.plan.planner import LITTLE_SHARE, GraphPlanner
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.fragmentation import HeapLimit

MIB = 1 << 20
LAYERS, BUDGET = 12, 32 * MIB


def _chain() -> Problem:
    """Every layer leaves 4 MiB for backward; an op takes 1 ms."""
    saved = tuple(Tensor(f"a{i}", 4 * MIB, "activation") for i in range(LAYERS))
    forward = [Op(f"f{i}", "forward", 1000, (), (f"a{i}",)) for i in range(LAYERS)]
    back = [Op(f"b{i}", "backward", 1000, (f"a{i}",), ()) for i in reversed(range(LAYERS))]
    return Problem(saved, (*forward, *back))


def _machine(capacity: int) -> Machine:
    lanes = ("d2h", "device", "host"), ("h2d", "host", "device")
    tiers = Tier("device", capacity), Tier("host")
    return Machine(tiers, tuple(Lane(*lane, 100 * MIB / 1000) for lane in lanes))


def _planner(
    includes_touching: bool = False, lowering: str = "aot_eager", held_bytes: int = 0
) -> GraphPlanner:
    target = SimpleNamespace(room=lambda nbytes: HeapLimit(nbytes), holes_bytes=lambda n: n // 4)
    source: Any = SimpleNamespace(
        target=target,
        touch_again_us_per_mib=100.0,
        profile=SimpleNamespace(includes_touching=includes_touching, lacks_room=False),
        options=SimpleNamespace(lowering=lowering),
    )
    return GraphPlanner(source, PlanRequest("graph", held_bytes=held_bytes))


@pytest.fixture(autouse=True, params=[True, False])
def places(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """True if torch has our allocator, which gives blocks places."""
    monkeypatch.setattr(tensor_memory, "will_fit", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize(("left", "enough"), [(BUDGET // 8, True), (0, False)])
def test_a_plan_leaves_enough_room_if_its_tensors_would_do_with_less(
    left: int, enough: bool
) -> None:
    search = PlanSearch(_machine, lambda _: 0, "joint", 0.5)
    made = fit_budget(_chain(), search, BUDGET - left)
    assert made.result.timeline.peak_bytes["device"] == BUDGET - left
    holes = _planner()._holes(_chain(), BUDGET)
    assert holes.enough is not None and holes.touching_us is not None
    assert holes.enough(made.machine, made.result) is enough
    # within the whole budget, holes are no larger than what is left
    assert holes.touching_us(made.machine, made.result) == 0


def test_costs_of_measured_steps_include_the_touching() -> None:
    holes = _planner(includes_touching=True)._holes(_chain(), BUDGET)
    assert holes.touching_us is None and holes.enough is not None


def test_costs_of_steps_that_touched_nothing_again_do_not_include_it() -> None:
    holes = _planner()._holes(_chain(), BUDGET)
    assert holes.touching_us is not None and holes.enough is not None


def test_no_less_room_is_tried_for_kernels_whose_order_is_not_known() -> None:
    holes = _planner(lowering="inductor")._holes(_chain(), BUDGET)
    assert holes.touching_us is not None and holes.enough is None


def test_blocks_of_graphs_among_others_are_not_expected_to_get_places(places: bool) -> None:
    planner = _planner()
    assert planner.places_blocks(BUDGET) is places
    little = BUDGET // LITTLE_SHARE
    assert _planner(held_bytes=little).places_blocks(BUDGET) is places
    assert not _planner(held_bytes=little + 1).places_blocks(BUDGET)


def test_no_less_room_is_tried_where_steps_lacked_it() -> None:
    planner = _planner()
    planner.source.profile.lacks_room = True
    holes = planner._holes(_chain(), BUDGET)
    assert holes.needed and holes.enough is None
    search = PlanSearch(_machine, lambda _: 0, "joint", 0.5)
    for budget in (BUDGET, BUDGET // 2):
        made = fit_budget(_chain(), search, budget, holes=holes)
        assert made.holes_bytes == holes.wanted_bytes and not made.spares_room
