"""The static order: what it may hold, and that no lane, however slow, gets it wrong."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from chains import bytes_range, chain, link
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_cases import case
from order_rig import Rig, check

from offcompile.ir import (
    DEVICE,
    HOST,
    Drop,
    Infeasible,
    InvalidInput,
    Machine,
    Move,
    OffloadError,
    Op,
    Plan,
    Problem,
    Tensor,
    Update,
)
from offcompile.ir import Start as Begins
from offcompile.passes.registry import make
from offcompile.planning.order import RunStep, WaitStep, static_order
from offcompile.planning.order import StartStep as Begin
from offcompile.planning.planner import judge_for
from offcompile.simulate import simulate
from offcompile.testing import plans, problems_with_machines

# ---- on plans of every kind ----------------------------------------------------------------


def check_tightened(problem: Problem, machine: Machine, plan: Plan) -> int:
    """On the machine given, and with less and less device memory while the plan is valid."""
    checked = 0
    while True:
        timeline = simulate(problem, machine, plan)
        if not timeline.valid:
            return checked
        check(problem, machine, plan, timeline)
        checked += 1
        peak = timeline.peak_bytes[DEVICE]
        capacity = machine.tier[DEVICE].capacity_bytes
        if checked == 4 or not peak:
            return checked
        machine = machine.with_capacity(DEVICE, peak if capacity != peak else peak - 1)


@settings(max_examples=80)
@given(st.data())
def test_plans_as_hypothesis_draws_them(data):
    problem, machine = data.draw(problems_with_machines(steady=False))
    check_tightened(problem, machine, data.draw(plans(problem, machine)))


def test_plans_as_the_oracle_s_cases_have_them():
    checked = 0
    for seed in range(200):
        problem, machine, plan = case(random.Random(seed))
        if not problem.steady:
            checked += check_tightened(problem, machine, plan)
    assert checked > 30


POLICIES = (
    "joint:evaluations=12,seconds=20",
    "activation_spill",
    "activation_spill:recompute=true",
    "recompute",
    "weight_rotation",
)


def training(rng: random.Random, layers: int, disk: bool) -> tuple[Problem, Machine]:
    problem = chain(
        [rng.randint(20, 100) for _ in range(layers)],
        [rng.randint(5, 90) for _ in range(layers + 1)],
        [float(rng.randint(2, 20)) for _ in range(layers)],
        steady=False,
        recompute=rng.random() < 0.5,
    )
    machine = link(
        None, rng.choice([3.0, 10.0, 40.0]), latency_us=rng.choice([0.0, 1.5]), disk=disk
    )
    low, high = bytes_range(problem, machine)
    return problem, machine.with_capacity(DEVICE, int(low + rng.random() * (high - low)))


@pytest.mark.parametrize("spec", POLICIES)
def test_plans_of_policies(spec):
    checked = 0
    for seed in range(25):
        rng = random.Random(seed)
        problem, machine = training(rng, rng.randint(2, 7), rng.random() < 0.3)
        try:
            plan = make(spec, judge_for(problem, machine)).apply(problem, machine, Plan())
        except Infeasible:
            continue
        checked += check_tightened(problem, machine, plan)
    assert checked > (2 if spec == "recompute" else 10)  # where weights stay little fits


def test_the_rig_would_notice():
    """An order without its waits, or with a load too early, does not pass."""
    unsafe = early = 0
    for seed in range(12):
        problem, machine = training(random.Random(seed), 5, False)
        try:
            judge = judge_for(problem, machine)
            plan = make("joint:evaluations=4", judge).apply(problem, machine, Plan())
        except Infeasible:
            continue
        timeline = simulate(problem, machine, plan)
        order = static_order(problem, machine, plan, timeline)
        loads = [s for s in order.steps if isinstance(s, Begin) and s.move.startswith("in:")]
        without = tuple(s for s in order.steps if not isinstance(s, WaitStep))
        at_once = (*loads, *(s for s in order.steps if s not in loads))
        for steps in (without, at_once) if loads else ():
            rig_args = (problem, machine, plan, timeline, replace(order, steps=steps))
            with pytest.raises(AssertionError):
                Rig(*rig_args, random.Random(0), 0.0).run()
            unsafe, early = unsafe + (steps is without), early + (steps is at_once)
    assert unsafe > 4 and early > 4


# ---- by hand -------------------------------------------------------------------------------


def two_activations(trigger: str, ready: str | None = "B0") -> tuple[Problem, Plan]:
    """F0 and F1 write 40 bytes each, M wants 60 beside them, B1 and B0 read them again."""
    tensors = (Tensor("a", 40, "activation"), Tensor("b", 40, "activation"))
    problem = Problem(
        tensors,
        (
            Op("F0", "forward", 10, (), ("a",)),
            Op("F1", "forward", 10, (), ("b",)),
            Op("M", "forward", 10, (), (), workspace_bytes=60),
            Op("B1", "backward", 10, ("b",)),
            Op("B0", "backward", 10, ("a",)),
        ),
    )
    moves = (
        Move("out", "a", DEVICE, HOST, "d2h", "F0"),
        Move("in", "a", HOST, DEVICE, "h2d", trigger, ready),
    )
    return problem, Plan(moves=moves, drops=(Drop("a", DEVICE, "out"),))


def steps_of(problem: Problem, machine: Machine, plan: Plan) -> tuple[str, str]:
    timeline = simulate(problem, machine, plan)
    assert timeline.valid
    order = check(problem, machine, plan, timeline)
    return tuple(  # type: ignore[return-value]
        " ".join(
            s.name
            if isinstance(s, RunStep)
            else f"{type(s).__name__.removesuffix('Step')}({s.move})"
            for s in part
        )
        for part in (order.forward(), order.backward())
    )


def test_a_wait_stands_where_the_space_is_needed_and_a_load_before_the_op_in_whose_time_it_starts():
    problem, plan = two_activations("B1")
    assert steps_of(problem, link(100, 10.0), plan) == (
        "F0 Start(out) F1 Wait(out) M",
        "B1 Start(in) Wait(in) B0",
    )
    problem, plan = two_activations("F1")  # there is room only when M has ended
    assert steps_of(problem, link(100, 10.0), plan) == (
        "F0 Start(out) F1 Wait(out) M",
        "Start(in) B1 Wait(in) B0",
    )


def test_a_load_for_backward_waits_for_the_backward_program_and_one_that_forward_awaits_does_not():
    problem, plan = two_activations("F1")  # with room enough it starts beside M
    assert steps_of(problem, link(200, 10.0), plan) == (
        "F0 Start(out) F1 M",
        "Wait(out) Start(in) B1 Wait(in) B0",
    )
    problem, plan = two_activations("F1", ready="M")
    assert steps_of(problem, link(200, 10.0), plan) == (
        "F0 Start(out) F1 Wait(out) Start(in) Wait(in) M",
        "B1 B0",
    )


def test_a_load_whose_room_comes_free_within_an_op_starts_before_the_next():
    problem, plan = two_activations("F0")
    ops = tuple(replace(o, phase="backward") for o in problem.ops)
    problem = Problem((*problem.tensors, Tensor("c", 20, "activation")), ops)
    # `out` ends within F1, and the copy that it leaves is then brought back at once
    assert steps_of(problem, link(200, 10.0), plan) == (
        "",
        "F0 Start(out) F1 Wait(out) Start(in) M B1 Wait(in) B0",
    )


def test_figures_of_the_worst_case():
    problem, plan = two_activations("B1")
    timeline = simulate(problem, link(100, 10.0), plan)
    order = static_order(problem, link(100, 10.0), plan, timeline)
    assert order.device_bytes == (40, 80, 100, 40, 40)
    assert (order.peak_bytes, dict(order.tier_bytes)) == (100, {HOST: 40})


def test_host_updates_run_where_they_were_simulated():
    tensors = (Tensor("w", 10, "weight", HOST), Tensor("g", 10, "gradient"))
    ops = (
        Op("B", "backward", 4, (), ("g",)),
        Op("U", "update", 4, ("w", "g"), ("w",), host_duration_us=6),
        Op("X", "backward", 9),
    )
    plan = Plan(
        (Begins("w", HOST),),
        (Move("out", "g", DEVICE, HOST, "d2h", "B"),),
        updates=(Update("w", HOST),),
    )
    machine = link(50, 10.0)
    assert steps_of(Problem(tensors, ops), machine, plan) == ("", "B Start(out) X Wait(out) U")


def test_what_has_no_order():
    problem, plan = two_activations("B1")
    machine = link(100, 10.0)
    timeline = simulate(problem, machine, plan)
    with pytest.raises(InvalidInput, match="steady"):
        static_order(replace(problem, steady=True), machine, plan, timeline)
    with pytest.raises(InvalidInput, match="not that of a valid plan"):
        static_order(problem, machine, plan, simulate(problem, link(50, 10.0), plan))
    with pytest.raises(OffloadError, match="budget is 99"):
        static_order(problem, link(99, 10.0), plan, timeline)


def test_nothing_moves_nothing_waits():
    problem, _ = two_activations("B1")
    assert steps_of(problem, link(None, 1.0), Plan()) == ("F0 F1 M", "B1 B0")
