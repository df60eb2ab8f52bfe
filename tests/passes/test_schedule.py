"""The builder: whatever is decided, the plan is legal and holds no more than the capacity."""

from __future__ import annotations

import random

import pytest
from chains import bytes_range, chain, link
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import Direct, Infeasible, Recompute
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.passes.build.schedule import Builder, build
from offcompile.planning.planner import check_plan, judge_for

US = 10.0
NO_GAP = {("w5", "F5"), ("w0", "B0")}


def small(steady: bool = True, **more):
    return chain([100] * 6, [10] * 7, [US] * 6, steady=steady, **more)


def all_away(problem, tier="host"):
    return tuple(
        Away(f"w{i}", f"{phase}{i}", tier) for phase in "FB" for i in range(len(problem.ops) // 2)
    )


@pytest.mark.parametrize("steady", [True, False])
def test_nothing_decided_moves_nothing_but_first_loads(steady):
    problem = small(steady)
    plan = build(problem, link(None, 50.0), Decisions())
    assert len(plan.moves) == (0 if steady else 6)
    assert all(m.target == "device" for m in plan.moves)


def test_a_steady_rotation_hides_behind_compute():
    # each weight crosses twice in and once out: 24 µs of 180 µs on the link to the device;
    # the last layer's F and B are neighbours, and so are B0 and the next F0: no gap to use
    problem = small()
    away = tuple(a for a in all_away(problem) if (a.tensor, a.after) not in NO_GAP)
    low, high = bytes_range(problem, link(None, 50.0))
    machine = link((low + high) // 2, 50.0)
    plan = build(problem, machine, Decisions(away), judge_for(problem, machine))
    checked = check_plan(problem, machine, plan)
    assert checked.valid
    assert checked.timeline.makespan_us == 180.0


def test_write_back_once_for_both_gaps():
    problem = small()
    plan = build(problem, link(None, 50.0), Decisions(all_away(problem)))
    out = [m for m in plan.moves if m.source == "device"]
    assert sorted(m.tensor for m in out) == [f"w{i}" for i in range(6)]
    assert len(plan.moves) - len(out) == 12


def test_keeping_too_much_says_what_is_missing():
    problem = small()
    with pytest.raises(Infeasible) as error:
        build(problem, link(500, 50.0), Decisions())
    assert error.value.needed_bytes > 0
    assert f"{error.value.needed_bytes:,}" in error.value.reason


def test_lazy_loads_do_not_overlap_compute():
    # layer-to-layer execution: 12 loads of 2 µs each on top of 180 µs, and 2 µs more between
    # steps, where w0 must be written back before it can be fetched again
    problem = small()
    machine = link(None, 50.0)
    plan = Builder(problem, machine, Decisions(all_away(problem))).lazy()
    assert check_plan(problem, machine, plan).timeline.makespan_us == 180.0 + 12 * 2.0 + 2.0


def test_over_the_host_to_disk_and_back():
    problem = small()
    machine = link(None, 50.0, disk=True)
    plan = build(problem, machine, Decisions((Away("a3", "F3", "disk"),)))
    lanes = [m.lane for m in plan.moves]
    assert lanes == ["d2h", "disk_write", "disk_read", "h2d"]
    assert check_plan(problem, machine, plan).valid


@given(st.integers(0, 10**6))
@settings(max_examples=150)
def test_any_decisions_make_a_legal_plan(seed):
    rng = random.Random(seed)
    layers = rng.randint(1, 6)
    problem = chain(
        [rng.randint(1, 100) for _ in range(layers)],
        [rng.randint(1, 60) for _ in range(layers + 1)],
        [float(rng.randint(1, 10)) for _ in range(layers)],
        steady=rng.random() < 0.6,
        direct=1.5,
        recompute=True,
    )
    machine = link(None, rng.choice([2.0, 10.0, 50.0]), latency_us=1.5, disk=True)
    names = ["x"] + [f"a{i}" for i in range(1, layers)]
    away = [
        Away(f"w{i}", f"{p}{i}", rng.choice(["host", "host", "disk"]))
        for i in range(layers)
        for p in "FB"
        if rng.random() < 0.6
    ]
    away += [
        Away(names[i], f"F{i}", rng.choice(["host", "disk"]))
        for i in range(layers)
        if rng.random() < 0.5
    ]
    decisions = Decisions(
        tuple(away),
        tuple(Direct(f"F{i}", f"w{i}") for i in range(layers) if rng.random() < 0.3),
        tuple(Recompute(f"F{i}", f"B{i + 1}") for i in range(layers - 1) if rng.random() < 0.3),
    )
    need = max(Builder(problem, machine, decisions).kept_bytes)
    machine = machine.with_capacity("device", int(need * rng.choice([1, 1, 1.2])))
    plan = build(problem, machine, decisions, judge_for(problem, machine))
    checked = check_plan(problem, machine, plan)
    assert checked.violations == ()
    assert checked.timeline.peak_bytes["device"] <= machine.tier["device"].capacity_bytes
