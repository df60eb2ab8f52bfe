"""The builder: whatever is decided, the plan is legal and holds no more than the capacity."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from chains import bytes_range, chain, link
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.ir import Direct, Infeasible, Machine, Op, Problem, Recompute, Tensor, Update
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


def updates(layers: int, bytes_of_states: int = 120) -> Problem:
    """A backward pass whose weights lie on the host, with an update after each gradient."""
    tensors, ops = [Tensor("x", 10, "input", "device")], []
    for i in range(layers):
        tensors += [
            Tensor(f"w{i}", 20, "weight", "host"),
            Tensor(f"s{i}", bytes_of_states, "state", "host"),
            Tensor(f"g{i}", 20, "gradient", None),
        ]
        ops.append(Op(f"B{i}", "backward", US, ("x", f"w{i}"), (f"g{i}",)))
        kept = f"w{i}", f"s{i}"
        ops.append(Op(f"U{i}", "update", 1.0, (f"g{i}", *kept), kept, host_duration_us=US))
    return Problem(tuple(tensors), tuple(ops))


def sides(layers: int, on_host: frozenset[int]) -> Decisions:
    """Updates on either side; what the device updates leaves it at once."""
    away = [
        Away(t, f"U{i}", "host")
        for i in range(layers)
        if i not in on_host
        for t in (f"w{i}", f"s{i}")
    ]
    away += [Away(f"w{i}", f"B{i}", "host") for i in on_host]
    where = (Update(f"w{i}", "host" if i in on_host else "device") for i in range(layers))
    return Decisions(tuple(away), updates=tuple(where))


def at_rates(machine: Machine, *rates: float) -> Machine:
    lanes = (
        replace(lane, bytes_per_us=rate) for lane, rate in zip(machine.lanes, rates, strict=True)
    )
    return replace(machine, lanes=tuple(lanes))


def departures(problem: Problem, capacity: int | None, on_host: frozenset[int]) -> list[str]:
    """Tensors in the order in which the lane off the device takes them."""
    decisions = sides(len(problem.ops) // 2, on_host)
    machine = at_rates(link(capacity, 5.0), 1000.0, 5.0)  # what leaves queues up
    plan = build(problem, machine, decisions, judge_for(problem, machine))
    assert check_plan(problem, machine, plan).valid
    return [m.tensor for m in plan.moves if m.lane == "d2h"]


def test_a_gradient_for_the_host_passes_states_if_there_is_room_for_them() -> None:
    on_host = frozenset({2})
    problem = updates(4)
    roomy = departures(problem, None, on_host)
    assert roomy.index("g2") < max(roomy.index("s0"), roomy.index("s1"))
    decisions = sides(4, on_host)
    least = max(Builder(problem, link(None, 5.0), decisions).kept_bytes)
    tight = departures(problem, least, on_host)
    assert tight.index("s0") < tight.index("g2")


@given(st.integers(0, 10**6))
@settings(max_examples=150)
def test_a_plan_with_updates_on_both_sides_runs_at_any_speed(seed: int) -> None:
    rng = random.Random(seed)
    layers = rng.randint(2, 8)
    on_host = frozenset(i for i in range(layers) if rng.random() < 0.5)
    problem = updates(layers, rng.choice([10, 60, 200]))
    decisions, machine = sides(layers, on_host), link(None, rng.choice([1.0, 5.0, 30.0]))
    need = max(Builder(problem, machine, decisions).kept_bytes)
    machine = machine.with_capacity("device", int(need * rng.choice([1, 1.2, 2])))
    plan = build(problem, machine, decisions, judge_for(problem, machine))
    for rates in ((0.2, 40.0), (40.0, 0.2), (8.0, 8.0)):
        checked = check_plan(problem, at_rates(machine, *rates), plan)
        assert checked.violations == ()
