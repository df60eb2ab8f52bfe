"""Where weights live: the simplest plan that costs next to nothing, or else the fastest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offcompile.graph import weight_placement as module
from offcompile.graph.annotate import Annotated
from offcompile.graph.weight_placement import (
    NEAR_RIVAL,
    NEAR_TWIN,
    Choice,
    Decide,
    Terms,
    choose,
    weights_in_use_order,
)
from offcompile.ir import DEVICE, HOST, Infeasible, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.planning.fit_budget import Decided, PlanSearch, fit_budget, planning_seconds
from offcompile.planning.floors import floor_of
from offcompile.planning.planner import Beaten, Rival, device_us
from offcompile.report.explain import fates
from offcompile.report.modes import modes, module_rows

LAYERS, WEIGHT_BYTES, OP_US = 12, 1_000_000, 1000.0


def machine_for(device_bytes: int) -> Machine:
    """A copy of a weight takes as long as three ops."""
    rate = WEIGHT_BYTES / (3 * OP_US)
    return Machine(
        (Tier(DEVICE, device_bytes), Tier(HOST, None)),
        (Lane("h2d", HOST, DEVICE, rate), Lane("d2h", DEVICE, HOST, rate)),
    )


def tower(hosted: bool, stays: frozenset[str] = frozenset(), direct_us: float = 6000) -> Annotated:
    """A step of layers whose weights are too slow to load, and slower in place."""
    weights, ops, gradients = [], [], []
    for i in range(LAYERS):
        away = hosted and f"w{i}" not in stays
        home = HOST if away else DEVICE
        weights.append(Tensor(f"w{i}", WEIGHT_BYTES, "weight", home, pinned=not away))
        gradients.append(Tensor(f"g{i}", WEIGHT_BYTES // 100, "gradient", None, pinned=True))
    acts = [Tensor(f"a{i}", 1000, "activation", None) for i in range(LAYERS + 1)]
    for i in range(LAYERS):
        direct = {f"w{i}": direct_us} if hosted and f"w{i}" not in stays else {}
        reads = (f"w{i}", f"a{i}")
        ops.append(Op(f"F{i}", "forward", OP_US, reads, (f"a{i + 1}",), direct=direct))
    for i in reversed(range(LAYERS)):
        direct = {f"w{i}": direct_us} if hosted and f"w{i}" not in stays else {}
        reads = (f"w{i}", f"a{i}")
        ops.append(Op(f"B{i}", "backward", OP_US, reads, (f"g{i}",), direct=direct))
    first = Op("in", "forward", 1.0, (), ("a0",))
    tensors = (*weights, *gradients, *acts)
    return Annotated(Problem(tensors, (first, *ops), steady=False), {}, {}, {})


def at(budget: int | None, policy: str = "joint") -> Decide:
    def planned(
        found: Annotated,
        *,
        may_fit: bool,
        share: float = 1.0,
        worth_us: float = float("inf"),
        trial: bool = False,
    ) -> Decided:
        seconds = share * planning_seconds(found.problem)
        search = PlanSearch(machine_for, lambda budget_bytes: 0, policy, seconds, trial=trial)
        return fit_budget(found.problem, search, budget, may_fit=may_fit, worth_us=worth_us)

    return planned


def least(problem: Problem) -> int:
    return floor_of(problem, machine_for)


def on_host(stays: frozenset[str]) -> Annotated:
    return tower(True, stays)


def chosen(budget: int | None) -> Choice:
    return choose(tower(False), on_host, at(budget), budget is None, least)


def test_what_fits_stays() -> None:
    found = chosen(LAYERS * WEIGHT_BYTES * 2)
    assert found.stays is None and found.decided.fits


@pytest.mark.parametrize(("gain", "leaves"), [(0.01, True), (0.05, False)])
def test_weights_leave_for_no_less_than_the_target_asks_for(gain: float, leaves: bool) -> None:
    here, plan = tower(False), at(LAYERS * WEIGHT_BYTES * 2)

    def slower_here(found: Annotated, **given: Any) -> Decided:
        made = replace(plan(found, may_fit=False), fits=False)
        return replace(made, touching_us=0.03 * made.cost_us) if found is here else made

    def in_place(stays: frozenset[str]) -> Annotated:
        return tower(True, stays, direct_us=OP_US)

    found = choose(here, in_place, slower_here, False, least, Terms(gain=gain))
    assert found.stays == (frozenset() if leaves else None)


def test_some_weights_stay_where_loading_them_all_is_slow() -> None:
    budget = LAYERS * WEIGHT_BYTES * 3 // 4
    everything = at(budget)(on_host(frozenset()), may_fit=False)
    found = chosen(budget)
    assert found.stays and len(found.stays) < LAYERS
    assert "w0" in found.stays
    assert found.decided.result.makespan_us < 0.9 * everything.result.makespan_us
    assert found.decided.order.peak_bytes <= budget


def test_without_time_only_the_two_simple_choices_are_planned_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    budget, asked = 8 * WEIGHT_BYTES, []
    assert chosen(budget).stays  # some weights stay

    def counted(found: Annotated, **given: Any) -> Decided:
        asked.append(found)
        return at(budget)(found, **given)

    monkeypatch.setattr(module, "ENOUGH_SECONDS", -1.0)
    found = choose(tower(False), on_host, counted, False, least)
    assert found.stays == frozenset() and len(asked) == 2


def test_the_weights_that_are_chosen_are_searched_for_in_full() -> None:
    budget, full = LAYERS * WEIGHT_BYTES * 3 // 4, []

    def counted(found: Annotated, *, trial: bool = False, **given: Any) -> Decided:
        if not trial:
            full.append(found)
        return at(budget)(found, trial=trial, **given)

    found = choose(tower(False), on_host, counted, False, least)
    assert found.stays and full[-1] is found.annotated

    full.clear()
    with pytest.raises(Beaten):  # a search in full gains less than it would have to
        choose(
            tower(False),
            on_host,
            counted,
            False,
            least,
            rival=Rival(found.decided.cost_us / (NEAR_RIVAL + 0.1)),
        )
    stays = {t.id for t in found.annotated.problem.tensors if t.kind == "weight" and t.pinned}
    assert stays and not any(
        stays == {t.id for t in asked.problem.tensors if t.kind == "weight" and t.pinned}
        for asked in full
    )


def test_places_of_large_steps_are_compared_by_trials_and_one_is_searched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As for steps that outlines are made of, also where the weights are best at home."""
    monkeypatch.setattr(module, "OUTLINE_FROM_OPS", 1)
    budget, asked = LAYERS * WEIGHT_BYTES * 3 // 4, []

    def counted(found: Annotated, *, trial: bool = False, **given: Any) -> Decided:
        asked.append((found, trial))
        return at(budget)(found, trial=trial, **given)

    found = choose(tower(False), on_host, counted, False, least)
    assert found.stays
    assert [made for made, trial in asked if not trial] == [found.annotated]

    asked.clear()
    budget = (LAYERS + 2) * WEIGHT_BYTES
    home = kept_full()
    found = choose(home, lambda stays: None, counted, False, least)
    assert [made for made, trial in asked if not trial] == [home]
    assert found.annotated is home


def kept_full() -> Annotated:
    """Weights at home, and activations that have to leave."""
    found = tower(False)
    tensors = (
        replace(t, nbytes=WEIGHT_BYTES // 2) if t.kind == "activation" else t
        for t in found.problem.tensors
    )
    return replace(found, problem=replace(found.problem, tensors=tuple(tensors)))


def test_a_rival_ends_the_search_where_no_plan_can_beat_it() -> None:
    budget, asked = LAYERS * WEIGHT_BYTES * 3 // 4, []

    def counted(found: Annotated, **given: Any) -> Decided:
        made = at(budget)(found, **given)
        asked.append(found)
        return made

    def against(rival: Rival) -> Choice:
        asked.clear()
        return choose(tower(False), on_host, counted, False, least, rival=rival)

    with pytest.raises(Beaten):  # its ops alone take longer
        against(Rival(1.0))
    with pytest.raises(Beaten):
        against(Rival(of_ops=0.99))
    assert not asked
    with pytest.raises(Beaten):
        against(Rival(bound_us=1.0))
    assert not asked


def test_weights_that_stay_may_beat_a_rival_that_no_plan_with_all_on_the_host_can() -> None:
    budget = LAYERS * WEIGHT_BYTES * 3 // 4
    everything = at(budget)(on_host(frozenset()), may_fit=False)
    free = chosen(budget)
    rival_us = everything.result.lower_bound_us
    assert free.decided.cost_us < rival_us
    found = choose(tower(False), on_host, at(budget), False, least, rival=Rival(rival_us))
    assert found.stays and found.decided.cost_us < rival_us


def test_a_rival_says_where_weights_stay() -> None:
    """Only that place is tried, in full if the trial comes close; others, if no plan fits."""
    budget = LAYERS * WEIGHT_BYTES * 3 // 4
    free = chosen(budget)
    assert free.stays
    asked: list[tuple[frozenset[str], bool]] = []

    def counted(found: Annotated, *, trial: bool = False, **given: Any) -> Decided:
        asked.append((pinned(found), trial))
        return at(budget)(found, trial=trial, **given)

    def against(cost_us: float, stays: frozenset[str]) -> Choice:
        asked.clear()
        rival = Rival(cost_us, stays=stays)
        return choose(tower(False), on_host, counted, False, least, rival=rival)

    everywhere = frozenset(w for w, _ in weights_in_use_order(on_host(frozenset()).problem))
    found = against(free.decided.cost_us * 1.1, free.stays)
    assert found.stays == free.stays
    assert asked == [(everywhere, False), (free.stays, True), (free.stays, False)]
    with pytest.raises(Beaten):
        against(free.decided.cost_us / (NEAR_TWIN + 0.02), free.stays)
    assert (free.stays, False) not in asked

    found = against(free.decided.cost_us * 1.1, everywhere)  # more than fits
    assert found.stays and found.stays != everywhere


def pinned(found: Annotated) -> frozenset[str]:
    return frozenset(
        t.id for t in found.problem.tensors if t.kind == "weight" and (t.pinned or t.home == DEVICE)
    )


def test_the_floor_has_all_of_them_on_the_host() -> None:
    found = chosen(None)
    assert found.stays == frozenset()
    assert found.decided.order.peak_bytes < 3 * WEIGHT_BYTES


def test_the_floor_is_of_weights_on_the_device_where_the_host_cannot_take_them() -> None:
    planned = at(None)

    def refusing(found: Annotated, **asked: Any) -> Decided:
        if any(t.home == HOST for t in found.problem.tensors):
            raise Infeasible("The host tier is full.", None, "")
        return planned(found, **asked)

    found = choose(tower(False), on_host, refusing, True, least)
    assert found.stays is None
    assert found.decided.order.peak_bytes > LAYERS * WEIGHT_BYTES


def test_weights_that_are_as_fast_in_place_all_leave() -> None:
    found = choose(
        tower(False),
        lambda stays: tower(True, stays, direct_us=OP_US),
        at(2 * WEIGHT_BYTES),
        False,
        least,
    )
    assert found.stays == frozenset()
    plan = found.decided.result.plan
    assert len(plan.directs) == 2 * LAYERS and not plan.moves


def saving(hosted: bool, weight_bytes: int) -> Annotated:
    """The same step with large activations."""
    sizes = {"weight": weight_bytes, "gradient": weight_bytes, "activation": WEIGHT_BYTES}
    problem = tower(hosted).problem
    tensors = tuple(replace(t, nbytes=sizes[t.kind]) for t in problem.tensors)
    return Annotated(replace(problem, tensors=tensors), {}, {}, {})


@pytest.mark.parametrize(("weight_bytes", "tried"), [(1_000, False), (20_000, True)])
def test_weights_that_take_next_to_nothing_are_planned_in_one_place(
    weight_bytes: int, tried: bool
) -> None:
    asked: list[frozenset[str]] = []

    def leaving(stays: frozenset[str]) -> Annotated:
        asked.append(stays)
        return saving(True, weight_bytes)

    here = saving(False, weight_bytes)
    found = choose(here, leaving, at(5 * WEIGHT_BYTES), False, least)
    assert not found.decided.fits
    assert bool(asked) is tried


def test_weights_that_take_next_to_nothing_leave_if_the_step_does_not_fit_otherwise() -> None:
    here, there = saving(False, 1_000), saving(True, 1_000)
    budget = least(there.problem)
    assert budget < least(here.problem)
    found = choose(here, lambda stays: there, at(budget), False, least)
    assert found.stays == frozenset()


def test_a_budget_that_nothing_fits_is_refused_with_the_least_that_does() -> None:
    with pytest.raises(Infeasible, match="below the floor"):
        chosen(WEIGHT_BYTES // 1000)


def test_where_weights_cannot_leave_the_refusal_is_that_of_the_plain_step() -> None:
    with pytest.raises(Infeasible, match="11,000,000 bytes"):
        choose(tower(False), lambda stays: None, at(5 * WEIGHT_BYTES), False, least)


def test_the_order_of_use() -> None:
    order = [name for name, _ in weights_in_use_order(on_host(frozenset({"w3"})).problem)]
    assert order == [f"w{i}" for i in range(LAYERS) if i != 3]


def test_modules_are_told_apart_by_how_they_are_treated() -> None:
    found = chosen(LAYERS * WEIGHT_BYTES * 3 // 4)
    problem, result = found.annotated.problem, found.decided.result
    told = {
        fate.tensor.id: fate
        for fate in fates(problem, found.decided.machine, result.plan, result.timeline)
    }
    every = modes(problem, result.plan, told)
    settled = [m for m in every if m.kind != "activation"]
    assert {m.tensor for m in settled} == {f"{k}{i}" for k in "wg" for i in range(LAYERS)}
    assert {m.what for m in every if m.kind == "activation"}  # what forward saves
    by_id = {m.tensor: m for m in every}
    for i in range(LAYERS):
        stays = f"w{i}" in (found.stays or ())
        assert (by_id[f"w{i}"].what == "stays on the device") == stays
        assert by_id[f"g{i}"].what == "stays on the device"
    loaded = [m for m in every if m.what.startswith("loaded")]
    assert loaded and all(
        "in place everywhere 10.000 ms slower, moves for" in m.why for m in loaded
    )
    rows = list(module_rows(settled, {m.tensor: f"layer {m.tensor[1:]}" for m in settled}))
    assert len(rows) == 2 * LAYERS
    assert ("layer 0", "weight", "976.56 KiB") in [row[:3] for row in rows]
    cost_us = {m.tensor: m.cost_us for m in settled}
    costs_us = [cost_us[f"{row[1][0]}{row[0].split()[1]}"] for row in rows]
    assert costs_us == sorted(costs_us, reverse=True)


def test_shares_of_weights_are_compared_only_where_places_may_gain_what_updates_cost() -> None:
    budget = LAYERS * WEIGHT_BYTES * 3 // 4
    found = at(budget)(on_host(frozenset()), may_fit=False)
    stay = replace(found, result=replace(found.result, lower_bound_us=0.0))
    gain_us = stay.cost_us - found.result.lower_bound_us
    assert gain_us > 0
    for times, dear in ((0, False), (1, False), (3, True)):
        leave = replace(found, updates_us=times * gain_us)
        choice = Choice(on_host(frozenset()), leave)
        assert module._dear_to_update(choice, stay) is dear
        assert not module._dear_to_update(choice, None)


def test_some_weights_may_leave_for_their_updates_where_no_plan_with_all_there_is_faster() -> None:
    budget = LAYERS * WEIGHT_BYTES * 3 // 4
    leave = at(budget)(on_host(frozenset()), may_fit=False)
    stay = replace(leave, result=at(LAYERS * WEIGHT_BYTES * 2)(tower(False), may_fit=True).result)
    assert stay.cost_us < leave.result.lower_bound_us
    choice = Choice(on_host(frozenset()), leave)
    assert not module._dear_to_update(choice, stay)  # the update is in the plan, or costs nothing
    assert module._dear_to_update(replace(choice, decided=replace(leave, updates_us=1.0)), stay)


def test_a_step_is_not_nearly_free_if_the_host_could_take_its_updates() -> None:
    found = tower(False).problem
    updates = [Op(f"U{i}", "update", OP_US / 5, (f"g{i}",), (f"w{i}",)) for i in range(LAYERS)]
    step = replace(found, ops=(*found.ops, *updates))
    whole_us = sum(op.duration_us for op in step.ops)
    made = at(LAYERS * WEIGHT_BYTES * 2)(Annotated(step, {}, {}, {}), may_fit=True)
    assert made.cost_us == pytest.approx(whole_us)
    assert not module._hides(made, step)
    assert module._hides(
        made, replace(step, ops=tuple(replace(o, phase="backward") for o in step.ops))
    )
    assert device_us(step) == pytest.approx(device_us(found))
