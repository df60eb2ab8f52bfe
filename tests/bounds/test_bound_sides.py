"""The bound of one moment where host and device can both make the updates."""

from __future__ import annotations

import math

import pytest

from offcompile.bounds import lower_bound
from offcompile.bounds.moment.cut import cut_bound
from offcompile.bounds.survey import survey
from offcompile.ir import Lane, Machine, Op, Plan, Problem, Tensor, Tier
from offcompile.passes.registry import make
from offcompile.planning.planner import judge_for

COUNT = 12
STATE_BYTES = 100


def updates(host_us: float = 50.0, pinned: bool = False) -> Problem:
    """Gradients that come one by one, and their updates of states at home on the host."""
    tensors, ops = [], []
    for i in range(COUNT):
        tensors += [
            Tensor(f"w{i}", 1, "weight", "host", pinned=pinned),
            Tensor(f"g{i}", 1, "gradient"),
            Tensor(f"s{i}", STATE_BYTES, "state", "host", pinned=pinned),
        ]
        ops.append(Op(f"B{i}", "backward", 1.0, (), (f"g{i}",)))
        read, written = (f"g{i}", f"w{i}", f"s{i}"), (f"w{i}", f"s{i}")
        ops.append(Op(f"U{i}", "update", 1.0, read, written, host_duration_us=host_us))
    return Problem(tuple(tensors), tuple(ops))


def machine(h2d: float = 10.0, mib: int | None = 320) -> Machine:
    lanes = (Lane("h2d", "host", "device", h2d), Lane("d2h", "device", "host", 1000.0))
    return Machine((Tier("device", mib), Tier("host")), lanes)


def bound_us(problem: Problem, on: Machine) -> float:
    return cut_bound(survey(problem, on), math.inf) / 1e3


def planned_us(problem: Problem, on: Machine) -> float:
    judge = judge_for(problem, on)
    plan = make("joint:evaluations=200,seconds=30", judge).apply(problem, on, Plan())
    return judge(problem, on, plan).makespan_us


def test_states_pinned_to_the_host_take_its_time_for_all_updates() -> None:
    problem = updates(pinned=True)
    assert bound_us(problem, machine()) == pytest.approx(COUNT * 50.0, rel=0.01)


def test_both_sides_take_what_the_shorter_of_all_splits_leaves_them() -> None:
    """A sixth by the host at 50 µs each, the others by the device, at 10 µs for the states."""
    problem, on = updates(), machine()
    shortest = COUNT * 50.0 * 10.1 / (50.0 + 10.1)
    found = bound_us(problem, on)
    assert 0.97 * shortest < found <= planned_us(problem, on)
    assert lower_bound(problem, on).us >= found * 0.99


@pytest.mark.parametrize("host_us", [1.0, 5.0, 20.0, 400.0])
@pytest.mark.parametrize("h2d", [1.0, 30.0])
def test_no_plan_is_faster(host_us: float, h2d: float) -> None:
    problem, on = updates(host_us), machine(h2d)
    assert bound_us(problem, on) <= planned_us(problem, on) * (1 + 1e-9)


def test_a_faster_link_or_host_never_raises_the_bound() -> None:
    by_link = [bound_us(updates(), machine(rate)) for rate in (1.0, 3.0, 10.0, 100.0)]
    by_host = [bound_us(updates(us), machine()) for us in (100.0, 50.0, 10.0, 1.0)]
    for found in (by_link, by_host):
        assert found == sorted(found, reverse=True)


def in_blocks(blocks: int, host_us: float) -> Problem:
    """Large weights whose states are updated block by block, and are on the host at the end."""
    tensors, ops = [Tensor("home", 1, "weight", "host", pinned=True)], []
    for i in range(COUNT):
        parts = [f"s{i}.{k}" for k in range(blocks)]
        tensors += [Tensor(f"w{i}", 60, "weight", "host"), Tensor(f"g{i}", 60, "gradient")]
        tensors += [Tensor(part, STATE_BYTES // blocks, "state", "host") for part in parts]
        ops.append(Op(f"B{i}", "backward", 1.0, (), (f"g{i}",)))
        for k, part in enumerate(parts):
            read, us = (f"g{i}", f"w{i}", part), host_us / blocks
            ops.append(Op(f"U{i}.{k}", "update", 1.0, read, (f"w{i}", part), host_duration_us=us))
    back = [t.id for t in tensors if t.kind in ("weight", "state")]
    ops.append(Op("back", "update", 0.0, tuple(back), ("home",), host_duration_us=0.0))
    return Problem(tuple(tensors), tuple(ops))


@pytest.mark.parametrize("host_us", [1.0, 400.0])
@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_what_all_blocks_share_crosses_once(blocks: int, host_us: float) -> None:
    lanes = (Lane("h2d", "host", "device", 1000.0), Lane("d2h", "device", "host", 1.0))
    on = Machine((Tier("device", 600), Tier("host")), lanes)
    problem = in_blocks(blocks, host_us)
    found = bound_us(problem, on)
    assert found <= planned_us(problem, on) * (1 + 1e-9)
    # gradients or weights cross whole; a bound that knows blocks is as good as one that does not
    assert found == pytest.approx(bound_us(in_blocks(1, host_us), on), rel=0.1)


def gradients(count: int = 10) -> Problem:
    """A forward op, and gradients that are for whoever comes after the step."""
    tensors = [Tensor("a", 10, "activation")]
    tensors += [Tensor(f"g{i}", 100, "gradient") for i in range(count)]
    ops = [Op("F", "forward", 100.0, (), ("a",))]
    ops += [Op(f"B{i}", "backward", 1.0, ("a",), (f"g{i}",)) for i in range(count)]
    return Problem(tuple(tensors), tuple(ops))


def slow_out(capacity: int) -> Machine:
    lanes = (Lane("h2d", "host", "device", 10.0), Lane("d2h", "device", "host", 10.0))
    return Machine((Tier("device", capacity), Tier("host")), lanes)


def test_gradients_without_room_at_the_end_leave_after_forward() -> None:
    """The device holds three of ten: seven cross in 10 µs each, after the 100 µs of forward."""
    found = bound_us(gradients(), slow_out(310))
    assert found == pytest.approx(100 + 7 * 10, rel=0.01)
    assert found <= planned_us(gradients(), slow_out(310)) * (1 + 1e-9)
    # with room for all, compute is what takes time
    assert bound_us(gradients(), slow_out(2000)) <= 110 + 1e-6
