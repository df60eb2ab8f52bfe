"""Updates beside their states: which go to the host, and that what they read is there in time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memferry_problems import apply, machine, makespan, stands_the_law, step

from offcompile.ir import DEVICE, HOST, Infeasible, Op, Problem, Tensor, Update
from offcompile.passes.near_memory_update import NearMemoryUpdate, host_updates
from offcompile.simulate import simulate
from offcompile.testing import problems_with_machines

HOSTED = "near_memory_update:where=host"


def test_all_updates_on_the_host_with_the_states_there():
    problem, where = step([1000, 1000, 1000]), machine()
    plan = apply(problem, where, HOSTED)
    assert plan.updates == tuple(Update(f"w{i}", HOST) for i in range(3))
    for i in range(3):
        assert (f"s{i}", HOST) in {(s.tensor, s.tier) for s in plan.start}
        assert not any(m.tensor == f"s{i}" for m in plan.moves)
    makespan(problem, where, plan)


def test_host_updates_overlap_backward():
    problem, where = step([1000, 1000, 1000], compute_us=40.0), machine()
    timeline = simulate(problem, where, apply(problem, where, HOSTED))
    at = {s.id: s for s in timeline.spans if s.step == 0}
    assert at["U2"].lane == "host_compute"
    assert at["B2"].end_ns <= at["U2"].start_ns and at["U2"].end_ns <= at["B0"].end_ns


def test_none_on_the_host():
    problem, where = step([1000, 1000]), machine()
    plan = apply(problem, where, "near_memory_update:where=device")
    assert plan.updates == ()
    makespan(problem, where, plan)


@pytest.mark.parametrize("host_us", [0.5, 5.0, 30.0, 500.0])
def test_auto_is_never_slower_than_all_or_none(host_us):
    problem, where = step([500, 1500, 1000, 2000], host_update_us=host_us), machine(20_000)
    auto, everything, nothing = (
        makespan(problem, where, apply(problem, where, f"near_memory_update:where={w}"))
        for w in ("auto", "host", "device")
    )
    assert auto <= min(everything, nothing)


def test_auto_balances_the_host_lane_against_compute():
    """The host lane is slow: some updates go there, the last gradients' stay on the device."""
    problem = step([100] * 6, compute_us=10.0, update_us=20.0, host_update_us=50.0)
    plan = apply(problem, machine(), "near_memory_update")
    hosted = {u.weight for u in plan.updates}
    assert 0 < len(hosted) < 6
    # gradients are ready in the order 5, 4, …: what is hosted comes first in it
    assert hosted == {f"w{i}" for i in range(5, 5 - len(hosted), -1)}
    makespan(problem, machine(), plan)


def test_auto_without_a_judge_goes_by_the_estimate():
    problem = step([100] * 6, compute_us=10.0, update_us=20.0, host_update_us=50.0)
    plan = apply(problem, machine(), "near_memory_update", judged=False)
    assert 0 < len(plan.updates) < 6
    makespan(problem, machine(), plan)


def test_an_update_that_cannot_run_there_stays():
    problem = step([100, 100])
    ops = tuple(
        Op(o.id, o.phase, o.duration_us, o.reads, o.writes) if o.id == "U1" else o
        for o in problem.ops
    )
    problem = Problem(problem.tensors, ops, problem.steady)
    plan = apply(problem, machine(), HOSTED)
    assert plan.updates == (Update("w0", HOST),)
    makespan(problem, machine(), plan)


def test_weights_that_share_an_update_go_together():
    tensors = tuple(Tensor(w, 10, "weight", HOST) for w in "abc")

    def update(name, writes, host_us):
        return Op(name, "update", 1.0, writes, writes, host_duration_us=host_us)

    ops = (update("U0", ("a", "b"), 2.0), update("U1", ("b", "c"), 3.0))
    found = host_updates(Problem(tensors, ops))
    assert [(u.weights, len(u.ops)) for u in found] == [(("a", "b", "c"), 2)]
    # one of them cannot: none of them may
    assert host_updates(Problem(tensors, (ops[0], update("U1", ("b", "c"), None)))) == ()


def test_states_need_no_place_on_the_device():
    """States of 6,000 bytes and a device of 2,100: only updates on the host can do that."""
    problem = step([1000, 1000, 1000], steady=False)
    where = machine(device=2_100)
    plan = apply(problem, where, "near_memory_update")
    assert len(plan.updates) == 3
    makespan(problem, where, plan)


def test_gradients_in_place_where_the_link_is_what_limits():
    problem = step([4000, 4000, 4000], compute_us=5.0, slower=0.1, host_update_us=1.0)
    where = machine()
    plan = apply(problem, where, HOSTED)
    moved = makespan(problem, where, plan)
    assert {d.tensor for d in plan.directs} >= {"g0"}
    assert moved < makespan(problem, where, apply(problem, where, HOSTED, judged=False))


def test_infeasible_names_the_missing_bytes():
    with pytest.raises(Infeasible) as caught:
        apply(step([1000]), machine(device=15), "near_memory_update")
    assert caught.value.needed_bytes == 5
    assert DEVICE in str(caught.value)


def test_an_unknown_place_is_refused():
    with pytest.raises(ValueError, match="where is 'disk'; it must be one of auto, host, device"):
        NearMemoryUpdate(where="disk")


@settings(max_examples=40, deadline=None)
@given(problems_with_machines(), st.sampled_from(("auto", "host", "device")))
def test_any_problem_gets_a_lawful_plan_or_a_reason(both, where):
    stands_the_law(*both, f"near_memory_update:where={where}")
