"""Tolls, the compute time that moves take: in no simulated time, but in every comparison."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from chains import link, random_chain
from hypothesis import given, settings

import offcompile.runtime.measure.beside as beside
from offcompile.ir import (
    DEVICE,
    HOST,
    Codec,
    Drop,
    InvalidInput,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Start,
    Tensor,
)
from offcompile.ir.jsonio import machine_from_json, machine_to_json
from offcompile.ir.textio import parse_machine, print_machine
from offcompile.machine.hardware import load_profile
from offcompile.machine.target import CpuTarget
from offcompile.machine.tolls import ASKING_US, LANE_US, LEAST_DISK_TOLL, LEAST_TOLL
from offcompile.planning.feedback.corrections import Factors, factors_of
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep
from offcompile.planning.planner import plan_problem
from offcompile.runtime.measure.timing import Stopwatch
from offcompile.simulate import Simulator
from offcompile.testing import machines

RATE = 10.0


def with_tolls(machine: Machine, toll_us: float, share: float, bypass: float = 0.0) -> Machine:
    lanes = (
        replace(lane, toll_us=toll_us, toll_share=share, bypass_share=bypass)
        for lane in machine.lanes
    )
    return replace(machine, lanes=tuple(lanes))


def loads(ops_us: float) -> tuple[Problem, Plan]:
    """A weight that the second op could use in place, and one that nobody can, both loaded."""
    problem = Problem(
        (Tensor("near", 1000, "weight", HOST), Tensor("far", 1000, "weight", HOST)),
        (
            Op("first", "forward", ops_us),
            Op("second", "forward", ops_us, ("near", "far"), direct={"near": 2 * ops_us}),
        ),
    )
    moves = tuple(
        Move(f"in:{t}", t, HOST, DEVICE, "h2d", None, "second", False, None)
        for t in ("near", "far")
    )
    return problem, Plan(start=(Start("near", HOST), Start("far", HOST)), moves=moves)


@pytest.mark.parametrize(
    ("ops_us", "toll_us"),
    # one of two copies of 100 us is the processor's own; compute waits 0, 50, 200 us for both
    [(200.0, 2 * 7.0 + 80.0), (150.0, 2 * 7.0 + 80.0 * 0.5), (0.0, 2 * 7.0)],
)
def test_a_copy_takes_its_share_while_compute_has_something_to_do(
    ops_us: float, toll_us: float
) -> None:
    problem, plan = loads(ops_us)
    machine = with_tolls(link(None, RATE), 7.0, 0.8)
    timeline = Simulator(problem, machine).run(plan)
    assert timeline.valid and timeline.toll_us == pytest.approx(toll_us)
    assert timeline.cost_us == timeline.makespan_us + timeline.toll_us
    free = Simulator(problem, link(None, RATE)).run(plan)
    assert replace(timeline, toll_us=0.0) == free and free.toll_us == 0.0


def packs(ops_us: float, codec: str | None) -> tuple[Problem, Plan]:
    """An activation that is away between forward and backward."""
    x = Tensor("x", 1000, "activation", ratios={"bitmask": 0.5})
    problem = Problem(
        (x,),
        (
            Op("first", "forward", ops_us, (), ("x",)),
            Op("between", "forward", ops_us),
            Op("last", "backward", ops_us, ("x",)),
        ),
    )
    moves = (
        Move("out", "x", DEVICE, HOST, "d2h", "first", None, False, codec),
        Move("in", "x", HOST, DEVICE, "h2d", "out", "last", False, codec),
    )
    return problem, Plan(moves=moves, drops=(Drop("x", DEVICE, "out"),))


@pytest.mark.parametrize(
    ("ops_us", "codec", "toll_us"),
    # each of two moves of 50 us packs or unpacks for 40; compute waits 0, 60, 100 us for both
    [
        (200.0, "bitmask", 2 * 7.0 + 0.8 * 80.0),
        (40.0, "bitmask", 2 * 7.0 + 0.8 * 80.0 * 0.25),
        (0.0, "bitmask", 2 * 7.0),
        (200.0, None, 2 * 7.0),
    ],
)
def test_packing_takes_its_share_while_compute_has_something_to_do(
    ops_us: float, codec: str | None, toll_us: float
) -> None:
    problem, plan = packs(ops_us, codec)
    machine = replace(link(None, RATE), codecs=(Codec("bitmask", True, 25.0),))
    timeline = Simulator(problem, with_tolls(machine, 7.0, 0.8)).run(plan)
    assert timeline.valid and timeline.toll_us == pytest.approx(toll_us)


def writer(layers: int = 6, slower: float = 1.05) -> Problem:
    """A backward whose gradients are a little slower to write on the host, and may leave freely."""
    grads = tuple(Tensor(f"g{i}", 1000, "gradient") for i in range(layers))
    x = Tensor("x", 10, "input", DEVICE, pinned=True)
    ops = tuple(
        Op(f"b{i}", "backward", 150.0, ("x",), (f"g{i}",), direct={f"g{i}": 150.0 * slower})
        for i in range(layers)
    )
    end = Op("end", "backward", 150.0, ("x",))
    return Problem((x, *grads), (*ops, end), False)


def test_what_a_copy_takes_decides_whether_it_is_made() -> None:
    problem, machine = writer(), link(2100, RATE)
    free = plan_problem(problem, machine, "joint:evaluations=200,seconds=60", seconds=60)
    assert free.plan.moves and not free.plan.directs
    dear = with_tolls(machine, 0.0, 0.9)
    found = plan_problem(problem, dear, "joint:evaluations=200,seconds=60", seconds=60)
    assert found.plan.directs and not found.plan.moves
    assert found.cost_us < Simulator(problem, dear).run(free.plan).cost_us
    # the bound is of the step's time alone
    assert found.lower_bound_us <= free.makespan_us < found.makespan_us


def test_a_search_with_nothing_left_to_gain_but_tolls_ends_early() -> None:
    said: list[str] = []
    problem = writer(slower=3.0)
    machine = with_tolls(link(2100, RATE), 0.0, 0.5)
    found = plan_problem(problem, machine, "joint:seconds=60", 60.0, said.append)
    assert found.seconds < 30 and found.plan.moves and found.gap == pytest.approx(0.0, abs=1e-4)


@pytest.mark.parametrize(
    ("ops_us", "toll_us"),
    [(200.0, 100 * 0.2 + 100 * 0.8), (150.0, (100 * 0.2 + 100 * 0.8) * 0.75), (0.0, 0.0)],
)
def test_a_move_that_bypasses_the_processor_has_a_share_of_its_own(
    ops_us: float, toll_us: float
) -> None:
    problem, plan = loads(ops_us)
    timeline = Simulator(problem, with_tolls(link(None, RATE), 0.0, 0.8, 0.2)).run(plan)
    assert timeline.toll_us == pytest.approx(toll_us)


@pytest.mark.parametrize("seed", range(6))
def test_plans_made_with_tolls_cost_no_more_than_those_made_without(seed: int) -> None:
    problem, machine = random_chain(random.Random(seed), 6, 0.4, 0.8)
    dear = with_tolls(machine, 0.3, 0.7)
    spec = "joint:evaluations=400,seconds=60"
    free = plan_problem(problem, machine, spec, seconds=60)
    found = plan_problem(problem, dear, spec, seconds=60)
    assert found.cost_us <= Simulator(problem, dear).run(free.plan).cost_us * 1.02


@given(machine=machines())
@settings(max_examples=40)
def test_tolls_are_written_and_read(machine: Machine) -> None:
    plain = machine_to_json(machine)
    assert all(not {"toll_us", "toll_share", "bypass_share"} & set(lane) for lane in plain["lanes"])
    dear = with_tolls(machine, 300.0, 0.9, 0.1)
    assert machine_from_json(machine_to_json(dear)) == dear
    assert parse_machine(print_machine(dear)) == dear


@pytest.mark.parametrize("share", [-0.1, 1.1, "all"])
def test_a_share_is_one(share: object) -> None:
    lane = {"name": "h2d", "source": HOST, "target": DEVICE, "bytes_per_us": 1.0}
    tiers = [{"name": DEVICE}, {"name": HOST}]
    with pytest.raises(InvalidInput, match=r"toll_share.*a number from 0 to 1"):
        machine_from_json({"tiers": tiers, "lanes": [lane | {"toll_share": share}]})


def test_a_measured_step_has_in_it_what_moves_take() -> None:
    problem, plan = loads(200.0)
    timeline = Simulator(problem, with_tolls(link(None, RATE), 10.0, 0.8)).run(plan)
    measured_ns = round((2 * 400.0 + timeline.toll_us) * 1000)
    step = MeasuredStep((MeasuredSpan("forward", "compute", 0, measured_ns),), (), measured_ns)
    assert timeline.toll_us == 100.0
    assert factors_of(problem, plan, timeline, step) == Factors(2.0, 2.0)
    # no half consists of tolls alone
    least = MeasuredStep((MeasuredSpan("forward", "compute", 0, 100_000),), (), 100_000)
    assert factors_of(problem, plan, timeline, least) == Factors(0.125, 0.125)


@pytest.mark.parametrize(
    ("share", "disk", "measured", "tolls"),
    [
        (0.8, 0.2, True, (ASKING_US + 0.8 * LANE_US, 0.8, 0.2)),
        (0.8, LEAST_DISK_TOLL / 2, True, (ASKING_US + 0.8 * LANE_US, 0.8, 0.0)),
        (LEAST_TOLL / 2, 0.2, True, (ASKING_US, 0.0, 0.2)),
        (0.8, None, True, (ASKING_US + 0.8 * LANE_US, 0.8, 0.0)),
        (None, 0.2, True, (0.0, 0.0, 0.0)),
        (0.8, 0.2, False, (0.0, 0.0, 0.0)),
    ],
)
def test_a_measured_machine_has_tolls_on_its_lanes(
    share: float | None,
    disk: float | None,
    measured: bool,
    tolls: tuple[float, float, float],
    tmp_path: Path,
) -> None:
    h100 = load_profile("h100")
    profile = replace(h100, measured=measured, copy_toll_share=share, disk_toll_share=disk)
    target = CpuTarget(profile, (tmp_path,), 1 << 30, 1 << 20)
    lanes = target.machine(1 << 20).lanes
    assert len(lanes) == 4
    assert {(lane.toll_us, lane.toll_share, lane.bypass_share) for lane in lanes} == {tolls}


def test_the_shares_are_measured(tmp_path: Path) -> None:
    for share in (
        beside.copy_toll_share(product_us=300.0, rounds=2, copy_bytes=1 << 20),
        beside.disk_toll_share(tmp_path, product_us=300.0, rounds=2, nbytes=1 << 20),
    ):
        assert share is None or 0 <= share <= 1
    assert not list(tmp_path.iterdir())


class Busy(Stopwatch):
    def __exit__(self, *error: object) -> None:
        self.disturbed = True


def test_nothing_is_said_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(beside, "Stopwatch", Busy)
    assert beside.copy_toll_share(product_us=100.0, rounds=2, copy_bytes=1 << 20) is None
    assert beside.disk_toll_share(tmp_path, 100.0, rounds=2, nbytes=1 << 20) is None


def test_a_thread_more_than_cores_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Made-up clocks: products take twice as long beside moves that are not slowed."""
    running, now = [False], [0.0]

    class Moves:
        mean_s = 1.0

        def __init__(self, moves: beside.Moves) -> None: ...

        def alone_s(self) -> float:
            return 1.0

        def running(self) -> Moves:
            return self

        def __enter__(self) -> None:
            running[0] = True

        def __exit__(self, *error: object) -> None:
            running[0] = False

    def product(*args: torch.Tensor) -> None:
        now[0] += 2.0 if running[0] else 1.0

    monkeypatch.setattr(beside, "Repeated", Moves)
    monkeypatch.setattr(beside, "matmul_flop_per_us", lambda dtype: 1.0)
    monkeypatch.setattr(beside.torch, "mm", product)
    monkeypatch.setattr(beside.time, "perf_counter", lambda: now[0])
    assert beside.copy_toll_share() == pytest.approx(0.5)
    assert beside.disk_toll_share(tmp_path) == pytest.approx(0.5)
