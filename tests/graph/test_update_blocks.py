"""Large states that stream are updated block by block, and sum up to what they were as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offcompile.graph.annotate import Annotated
from offcompile.graph.update_advice import advice
from offcompile.graph.updates import Updates
from offcompile.ir import (
    DEVICE,
    HOST,
    UPDATE,
    Lane,
    Machine,
    Op,
    Plan,
    Problem,
    Start,
    Tensor,
    Tier,
)
from offcompile.machine.hardware import load_profile
from offcompile.passes.search.program_variant import hostable
from offcompile.planning.planner import lower_bound, plan_problem
from offcompile.simulate import Simulator

WEIGHT_BYTES, BLOCK_BYTES, COUNT = 4_000_004, 1 << 20, 4
#: AdamW keeps two float32 values for each float32 weight
STATE_BYTES = 2 * WEIGHT_BYTES
BLOCKS = -(-STATE_BYTES // BLOCK_BYTES)


def step(home: str = HOST) -> Annotated:
    """Weights that forward and backward use, and their gradients."""
    pinned = home == DEVICE
    weights = [Tensor(f"w{i}", WEIGHT_BYTES, "weight", home, pinned=pinned) for i in range(COUNT)]
    gradients = [
        Tensor(f"g{i}", WEIGHT_BYTES, "gradient", None, pinned=pinned) for i in range(COUNT)
    ]
    kept = [Tensor(f"a{i}", 1000, "activation") for i in range(COUNT + 1)]
    ops = [Op("in", "forward", 1.0, (), ("a0",))]
    ops += [Op(f"F{i}", "forward", 300.0, (f"w{i}", f"a{i}"), (f"a{i + 1}",)) for i in range(COUNT)]
    ops += [
        Op(f"B{i}", "backward", 600.0, (f"w{i}", f"a{i}"), (f"g{i}",))
        for i in reversed(range(COUNT))
    ]
    problem = Problem((*weights, *gradients, *kept), tuple(ops), steady=False)
    names = {f"{kind}{i}": f"layer {i}" for kind in "wg" for i in range(COUNT)}
    return Annotated(problem, {}, {}, {}, names=names)


def machine_with(device_bytes: int) -> Machine:
    lanes = Lane("h2d", HOST, DEVICE, 25_000.0), Lane("d2h", DEVICE, HOST, 25_000.0)
    return Machine((Tier(DEVICE, device_bytes), Tier(HOST, None)), lanes)


def updates(block_bytes: int | None = BLOCK_BYTES, streams: bool = True) -> Updates:
    made = Updates.read("adamw", load_profile("rtx4090"), apart=True, streams=streams)
    return replace(made, block_bytes=block_bytes)


def added(block_bytes: int | None = BLOCK_BYTES, home: str = HOST, streams: bool = True) -> Problem:
    return updates(block_bytes, streams).added(step(home)).problem


def ops_of(problem: Problem, weight: str) -> list[Op]:
    return [op for op in problem.ops if op.phase == UPDATE and weight in op.writes]


def test_blocks_sum_up_to_the_whole_update() -> None:
    whole, parts = added(None), added()
    for i in range(COUNT):
        (one,), several = ops_of(whole, f"w{i}"), ops_of(parts, f"w{i}")
        assert len(several) == BLOCKS
        for field in ("duration_us", "host_duration_us"):
            total = sum(getattr(op, field) for op in several)
            assert total == pytest.approx(getattr(one, field), abs=0.001 * BLOCKS)
        states = [parts.tensor[t] for op in several for t in op.writes if t != f"w{i}"]
        assert len({t.id for t in states}) == BLOCKS
        assert sum(t.nbytes for t in states) == STATE_BYTES
        assert all(t.nbytes <= BLOCK_BYTES and t.nbytes % 4 == 0 for t in states)
        assert all(f"g{i}" in op.reads for op in several)
    # a plan still decides about all of a weight
    assert {w: len(ops) for w, ops in hostable(parts).items() if w != "home"} == dict.fromkeys(
        (f"w{i}" for i in range(COUNT)), BLOCKS
    )


@pytest.mark.parametrize(("home", "streams"), [(DEVICE, True), (HOST, False)])
def test_states_that_never_move_are_one_block(home: str, streams: bool) -> None:
    problem = added(home=home, streams=streams)
    assert all(len(ops_of(problem, f"w{i}")) == 1 for i in range(COUNT))


@pytest.mark.long
def test_blocks_fit_where_whole_states_do_not() -> None:
    machine = machine_with(3 * WEIGHT_BYTES)  # a weight, its gradient, and half of its states
    hosted = plan_problem(added(None), machine, seconds=2.0)
    shared = plan_problem(added(), machine, seconds=2.0)
    on_host = {u.weight for u in hosted.plan.updates if u.where == HOST} - {"home"}
    assert len(on_host) == COUNT
    assert {u.weight for u in shared.plan.updates if u.where == HOST} - {"home"} < on_host
    assert shared.makespan_us < hosted.makespan_us
    assert lower_bound(added(), machine).us <= shared.makespan_us


def test_advice_is_about_whole_weights() -> None:
    annotated, profile = step(), load_profile("rtx4090")
    plain = Plan(start=tuple(Start(f"w{i}", tier) for i in range(COUNT) for tier in (DEVICE, HOST)))
    timeline = Simulator(annotated.problem, machine_with(1 << 30)).run(plain)
    assert timeline.valid
    assert set(advice(annotated, timeline, profile)) == {f"w{i}" for i in range(COUNT)}
