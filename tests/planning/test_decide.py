"""The budget, the runtime's share of it, and room for holes where that costs nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from chains import chain as training
from chains import link

from offcompile.ir import Infeasible, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.passes.build.gaps import MOST_CELLS
from offcompile.planning import plan_cache
from offcompile.planning.empty_turn import decide_beside
from offcompile.planning.fit_budget import (
    LONG_SHARE,
    SHORT_SHARE,
    Decided,
    Holes,
    PlanSearch,
    fit_budget,
)
from offcompile.planning.floors import floor_of, floors_by_run
from offcompile.planning.planner import PlanAsked, PlanResult, plan_asked

MIB = 1 << 20
LAYERS = 8


def chain() -> Problem:
    """Every layer leaves 4 MiB for backward; an op takes 1 ms."""
    saved = tuple(Tensor(f"a{i}", 4 * MIB, "activation") for i in range(LAYERS))
    ops = [
        Op(f"f{i}", "forward", 1000, (f"a{i - 1}",) if i else (), (f"a{i}",)) for i in range(LAYERS)
    ]
    ops += [Op(f"b{i}", "backward", 1000, (f"a{i}",), ()) for i in reversed(range(LAYERS))]
    return Problem(saved, tuple(ops))


def machine(bytes_per_us: float) -> object:
    def of(capacity: int) -> Machine:
        return Machine(
            (Tier("device", capacity), Tier("host")),
            (
                Lane("d2h", "device", "host", bytes_per_us),
                Lane("h2d", "host", "device", bytes_per_us),
            ),
        )

    return of


def search(bytes_per_us: float) -> PlanSearch:
    return PlanSearch(machine(bytes_per_us), lambda _: MIB, "joint", 1.0)  # type: ignore[arg-type]


def decided(budget: int | None, bytes_per_us: float, holes: int | None = 4 * MIB) -> Decided:
    return fit_budget(
        chain(),
        search(bytes_per_us),
        budget,
        holes=None if holes is None else Holes(holes),
    )


FAST, SLOW = 100 * MIB / 1000, 0.25 * MIB / 1000


def test_room_is_left_to_holes_where_moving_more_is_free() -> None:
    found = decided(20 * MIB, FAST)
    assert found.holes_bytes == 4 * MIB
    assert found.machine.tier["device"].capacity_bytes == 15 * MIB
    assert found.order.peak_bytes <= 15 * MIB
    assert found.result.timeline.makespan_us <= 1.02 * 2 * LAYERS * 1000


def test_where_moving_more_costs_time_the_plan_has_the_room() -> None:
    tight = decided(25 * MIB, SLOW)
    assert tight.holes_bytes == 0
    assert tight.result.timeline.makespan_us == pytest.approx(
        decided(25 * MIB, SLOW, holes=None).result.timeline.makespan_us
    )


def test_where_there_is_less_room_it_is_what_there_is() -> None:
    floor = floor_of(chain(), machine(FAST))  # type: ignore[arg-type]
    found = decided(floor + 5 * MIB, FAST, holes=8 * MIB)
    assert found.holes_bytes == 4 * MIB
    assert found.machine.tier["device"].capacity_bytes == floor


def test_holes_never_make_a_budget_infeasible() -> None:
    floor = floor_of(chain(), machine(FAST))  # type: ignore[arg-type]
    assert decided(floor + MIB, FAST).holes_bytes == 0
    with pytest.raises(Infeasible, match="below the floor"):
        decided(floor, FAST)


def test_what_stays_to_the_end_counts_whatever_leaves_before() -> None:
    """A gradient that can go to the host is no room for one that cannot."""
    tensors = (
        Tensor("w", 4 * MIB, "weight", "host"),
        Tensor("kept", MIB, "gradient", pinned=True),
        Tensor("leaves", 4 * MIB, "gradient"),
    )
    ops = (
        Op("f", "forward", 1000, ("w",), ()),
        Op("b", "backward", 1000, ("w",), ("kept",)),
        Op("c", "backward", 1000, (), ("leaves",)),
        Op("end", "backward", 0, (), ()),
    )
    floors = floors_by_run(Problem(tensors, ops, steady=False), machine(FAST))  # type: ignore[arg-type]
    assert floors == {"f": 4 * MIB, "b": 5 * MIB, "c": 5 * MIB, "end": MIB}


def test_the_floor_and_what_fits_leave_no_holes() -> None:
    assert decided(None, FAST).holes_bytes == 0
    everything = decided(LAYERS * 4 * MIB, FAST)
    assert everything.fits and everything.holes_bytes == 0


def test_a_plan_leaves_room_for_what_the_program_holds_between_forward_and_backward() -> None:
    whole, outside, budget = LAYERS * 4 * MIB, 16 * MIB, LAYERS * 4 * MIB + 2 * MIB

    def fit(problem: Problem) -> Decided:
        return fit_budget(problem, search(FAST), budget, holes=Holes(0), may_fit=True)

    alone, beside = decide_beside(0, chain(), fit), decide_beside(outside, chain(), fit)
    assert alone.fits and alone == fit(chain())
    sizes = {t.id: t.nbytes for t in chain().tensors}
    assert beside.kept is not None and not beside.fits
    assert whole - 20 * MIB <= sum(map(sizes.__getitem__, beside.kept)) <= budget - outside
    assert {op.id for op in chain().ops} >= {m.start_after for m in beside.result.plan.moves}


def test_a_step_with_room_for_that_stays_as_it_is() -> None:
    def fit(problem: Problem) -> Decided:
        return fit_budget(problem, search(FAST), 64 * MIB, holes=Holes(0), may_fit=True)

    found = decide_beside(16 * MIB, chain(), fit)
    assert found.fits and not found.result.plan.moves
    assert found.order == fit(chain()).order


def test_what_libraries_hold_counts_where_nothing_moves() -> None:
    peak = decided(LAYERS * 4 * MIB, FAST).order.peak_bytes
    libraries = replace(search(FAST), library_bytes=MIB)
    assert fit_budget(chain(), libraries, peak + MIB).fits
    assert not fit_budget(chain(), libraries, peak + MIB - 1).fits


def test_a_policy_that_needs_more_than_the_floor_says_so() -> None:
    with pytest.raises(Infeasible, match=r"not enough for weight_rotation.*policy joint") as caught:
        fit_budget(
            chain(), PlanSearch(machine(FAST), lambda _: 0, "weight_rotation", 1.0), 12 * MIB
        )
    assert "the floor is 8,388,608 bytes" in str(caught.value)


def touching(us_per_mib: float, budget: int) -> Holes:
    """Whatever of the budget the plan leaves to holes spares touching as much again."""

    def us(machine: Machine, made: PlanResult) -> float:
        room = budget - MIB - (machine.tier["device"].capacity_bytes or 0)
        return us_per_mib * (4 * MIB - room) / MIB

    return Holes(4 * MIB, us)


@pytest.mark.parametrize(("us_per_mib", "roomy"), [(0.0, False), (1e5, True)])
def test_a_plan_leaves_room_where_touching_memory_again_takes_longer(
    us_per_mib: float, roomy: bool
) -> None:
    budget = 25 * MIB
    free = decided(budget, SLOW, holes=None).result.cost_us
    with_room = decided(budget - 4 * MIB, SLOW, holes=None).result.cost_us
    assert with_room > free * 1.02
    found = fit_budget(
        chain(),
        search(SLOW),
        budget,
        holes=touching(us_per_mib, budget),
    )
    assert found.holes_bytes == (4 * MIB if roomy else 0)
    assert found.touching_us == (0.0 if roomy else us_per_mib * 4)
    assert found.cost_us == found.result.cost_us + found.touching_us


@pytest.mark.parametrize(("layers", "room"), [(2, 2 * MIB), (4, 4 * MIB)])
def test_half_the_room_is_left_where_it_is_enough(layers: int, room: int) -> None:
    """Here it is if the tensors of so many layers would fit besides."""

    def enough(machine: Machine, made: PlanResult) -> bool:
        left = 25 * MIB - MIB - (machine.tier["device"].capacity_bytes or 0)
        return left >= layers * MIB

    found = fit_budget(chain(), search(FAST), 25 * MIB, holes=Holes(4 * MIB, None, enough))
    assert found.holes_bytes == room


def test_room_for_holes_is_given_up_only_in_a_search_that_can_win(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second search is told what it must beat: the first plan, and what holes cost."""
    asked: list[float] = []

    def noted(question: PlanAsked, progress: object) -> PlanResult:
        asked.append(question.worth_us)
        return plan_asked(question)

    monkeypatch.setattr(plan_cache, "plan_asked", noted)
    near = [rate for rate in (0.5, 1.0, 2.0, 4.0) if searches(asked, rate * MIB / 1000) == 2]
    assert near, "each plan was within 0.5% of compute"


def searches(asked: list[float], bytes_per_us: float) -> int:
    asked.clear()
    found = decided(25 * MIB, bytes_per_us)
    if len(asked) == 2:
        first, second = asked
        assert first == float("inf") and second < float("inf")
        assert found.holes_bytes == 4 * MIB or found.cost_us < second
    return len(asked)


@pytest.mark.parametrize("trial", [False, True])
def test_near_the_floor_short_searches_decide_if_there_is_room_for_holes(
    monkeypatch: pytest.MonkeyPatch, trial: bool
) -> None:
    """However many shares of the room fit, one of them is searched; only one search is long."""
    asked: list[tuple[int, float, bool]] = []

    def noted(question: PlanAsked, progress: object) -> PlanResult:
        capacity = question.machine.tier["device"].capacity_bytes
        assert capacity is not None
        asked.append((capacity, question.seconds, question.trial))
        # the long one goes on from a short one; another has outlines of its own
        assert (question.begun_us < float("inf")) == (len(asked) == 3)
        return plan_asked(question)

    monkeypatch.setattr(plan_cache, "plan_asked", noted)
    floor = floor_of(chain(), machine(SLOW))  # type: ignore[arg-type]
    budget = floor + MIB + 2 * MIB
    found = fit_budget(chain(), replace(search(SLOW), trial=trial), budget, holes=Holes(2 * MIB))
    short = 1.0 if trial else SHORT_SHARE
    tries = [(floor, short, True), (floor + 2 * MIB, short, True)]
    if not trial:
        tries.append((floor + 2 * MIB - found.holes_bytes, LONG_SHARE, False))
    assert asked == tries


def test_near_the_floor_the_faster_plan_wins() -> None:
    """With room for holes the floor is left, at which each tensor waits for the one before."""
    floor = floor_of(chain(), machine(SLOW))  # type: ignore[arg-type]
    budget = floor + MIB + 4 * MIB
    at_floor = decided(budget - 4 * MIB, SLOW, holes=None).cost_us
    found = decided(budget, SLOW)
    assert found.cost_us == pytest.approx(decided(budget, SLOW, holes=None).cost_us)
    assert found.cost_us < at_floor / 1.02 and found.holes_bytes == 0


def test_a_long_step_takes_one_search_at_its_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def noted(question: PlanAsked, progress: object) -> PlanResult:
        asked.append(question)
        return plan_asked(question)

    monkeypatch.setattr(plan_cache, "plan_asked", noted)
    layers = 2 * MOST_CELLS
    sizes = [3 + i * 7 % 5 for i in range(layers + 1)]
    problem = training([1] * layers, sizes, [2.0] * layers, steady=False)
    searching = PlanSearch(lambda n: link(n, 5.0), lambda _: 0, "joint", 0.2)
    found = fit_budget(problem, searching, None, may_fit=False)
    assert found.order.peak_bytes <= floor_of(problem, searching.machine_for)
    assert len(asked) == 1
