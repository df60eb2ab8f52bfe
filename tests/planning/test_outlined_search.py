"""Searches that outlines cut short: those that cannot win, and those that go on from a trial."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from outlined import EVERYTHING, SAVED, machine, training

from offcompile.ir import DEVICE, Machine, Problem
from offcompile.outline import StepOutline, outline, outlines
from offcompile.planning import fit_budget as fitting
from offcompile.planning import plan_cache, planner
from offcompile.planning.fit_budget import Holes, KnownPlans, PlanSearch, fit_budget
from offcompile.planning.floors import floor_of
from offcompile.planning.planner import Beaten, PlanAsked, PlanResult, plan_asked

NEVER = float("inf")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[StepOutline]:
    """The outlines that searches make of any step, however small."""
    made = list[StepOutline]()

    def counting(problem: Problem, on: Machine) -> Iterator[StepOutline]:
        for found in outlines(problem, on):
            made.append(found)
            yield found

    monkeypatch.setattr(planner, "outlines", counting)
    monkeypatch.setattr(planner, "OUTLINE_FROM_OPS", 0)
    monkeypatch.setattr(fitting, "OUTLINE_FROM_OPS", 0)
    monkeypatch.setattr(planner, "OUTLINES_ONLY_FROM_OPS", 0)
    return made


def asked(worth_us: float = NEVER, begun_us: float = NEVER, trial: bool = False) -> PlanAsked:
    on = machine(EVERYTHING // 5)
    return PlanAsked(training(), on, seconds=0.2, worth_us=worth_us, trial=trial, begun_us=begun_us)


def promised_us() -> float:
    found = outline(asked().problem, asked().machine)
    assert found is not None
    return found.cost_us


def test_a_search_goes_on_only_with_outlines_that_its_trial_left_out(
    told: list[StepOutline],
) -> None:
    """A trial that came near to what the first outline promises has tried no other."""
    least_us = promised_us()
    with pytest.raises(Beaten):
        plan_asked(asked(begun_us=least_us * 1.05))
    assert len(told) == 1
    told.clear()
    found = plan_asked(asked(begun_us=least_us * 1.02))
    assert len(told) > 1
    assert found.timeline.valid


@pytest.mark.parametrize("trial", [False, True])
def test_a_step_whose_outline_takes_too_long_is_not_searched(
    told: list[StepOutline], trial: bool
) -> None:
    least_us = promised_us()
    with pytest.raises(Beaten):
        plan_asked(asked(worth_us=least_us * 0.95, trial=trial))
    assert len(told) == 1
    assert plan_asked(asked(worth_us=least_us * 2, trial=trial)).timeline.valid


def test_only_joint_searches_are_outlined(told: list[StepOutline]) -> None:
    plan_asked(replace(asked(), policy="gradient_reserve"))
    assert not told


@pytest.fixture
def capacities(monkeypatch: pytest.MonkeyPatch, told: list[StepOutline]) -> list[int]:
    """The device bytes of each search."""
    found = list[int]()

    def noted(question: PlanAsked, progress: object) -> PlanResult:
        found.append(question.machine.tier[DEVICE].capacity_bytes or 0)
        return plan_asked(question)

    monkeypatch.setattr(plan_cache, "plan_asked", noted)
    return found


def test_near_the_floor_the_search_without_room_for_holes_says_if_the_other_can_win(
    capacities: list[int], told: list[StepOutline]
) -> None:
    problem, room = training(), 2 * SAVED
    floor = floor_of(problem, machine)
    budget = floor + room
    search = PlanSearch(machine, lambda _: 0, "joint", 0.3, trial=True)
    found = fit_budget(problem, search, budget, holes=Holes(room), may_fit=False)
    assert capacities == [budget, floor]
    capacities.clear()
    # the search that goes on keeps to the room of its trial
    known = KnownPlans((found.result.plan,), found)
    longer = replace(search, trial=False, known=known)
    try:
        fit_budget(problem, longer, budget, holes=Holes(room), may_fit=False)
    except Beaten:
        assert found.cost_us > told[-1].cost_us
    assert capacities == [budget - found.holes_bytes]


@pytest.mark.parametrize(("touching_us", "tries"), [(0.0, 2), (1e9, 3)])
def test_a_plan_that_would_touch_memory_again_is_searched_for_beyond_outlines(
    capacities: list[int], monkeypatch: pytest.MonkeyPatch, touching_us: float, tries: int
) -> None:
    """No outline fits with room for holes; a search finds a plan there, as recomputing does."""
    problem, room = training(), 2 * SAVED
    budget = floor_of(problem, machine) + room

    def outlined(step: Problem, on: Machine) -> Iterator[StepOutline]:
        return iter(()) if on.tier[DEVICE].capacity_bytes != budget else outlines(step, on)

    monkeypatch.setattr(planner, "outlines", outlined)

    def touching(on: Machine, made: PlanResult) -> float:
        return touching_us if on.tier[DEVICE].capacity_bytes == budget else 0.0

    holes = Holes(room, touching)
    search = PlanSearch(machine, lambda _: 0, "joint", 0.3, trial=True)
    found = fit_budget(problem, search, budget, holes=holes, may_fit=False)
    assert capacities == [budget, budget - room, budget - room][:tries]
    assert found.holes_bytes == (room if tries == 3 else 0)
