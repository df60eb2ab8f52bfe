"""The strategies: lawful ids, all the variety they promise, and plans that are worth their name."""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from offcompile.ir import DEVICE, KINDS, SELF_ENDING_KINDS
from offcompile.ir.jsonio import (
    check_homes,
    machine_from_json,
    machine_to_json,
    problem_from_json,
    problem_to_json,
)
from offcompile.simulate import Simulator
from offcompile.testing import machines, plans, problems, problems_with_machines

EASY = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
FAST = (Phase.explicit, Phase.generate)
SEEK = settings(max_examples=3000, deadline=None, database=None)


@EASY
@given(problems_with_machines())
def test_problems_and_machines_are_lawful_and_suit_each_other(pair):
    problem, machine = pair
    assert problem_from_json(problem_to_json(problem)) == problem
    assert machine_from_json(machine_to_json(machine)) == machine
    assert check_homes(problem, machine) == ()
    assert all(c in machine.codec for t in problem.tensors for c in t.ratios)


@EASY
@given(st.booleans().flatmap(lambda s: problems(steady=s)))
def test_every_read_finds_a_value(problem):
    there = {
        t.id
        for t in problem.tensors
        if (t.kind not in SELF_ENDING_KINDS if problem.steady else t.home is not None)
    }
    for op in problem.ops:
        assert set(op.reads) <= there
        there |= set(op.writes)
    assert problem.steady or all(t.id in there for t in problem.tensors)


@EASY
@given(st.data())
def test_plans_name_only_what_exists(data):
    problem, machine = data.draw(problems_with_machines())
    plan = data.draw(plans(problem, machine))
    moves = [m.id for m in plan.moves]
    names = {None, *problem.op, *moves, *(r.id for r in plan.recomputes)}
    assert len(set(moves)) == len(moves)
    for m in plan.moves:
        assert m.tensor in problem.tensor and m.lane in machine.lane
        assert {m.source, m.target} <= set(machine.tier)
        assert m.codec is None or m.codec in machine.codec
        assert {m.start_after, m.ready_before} <= names
    for copy in (*plan.start, *plan.drops):
        assert copy.tensor in problem.tensor and copy.tier in machine.tier
    assert {d.after for d in plan.drops} <= names
    assert all(d.op in problem.op and d.tensor in problem.tensor for d in plan.directs)
    assert all(r.op in problem.op and r.before in problem.op for r in plan.recomputes)
    assert all(problem.tensor[u.weight].kind == "weight" for u in plan.updates)


@EASY
@given(st.data())
def test_sensible_plans_are_valid_where_there_is_room(data):
    problem, machine = data.draw(problems_with_machines())
    for tier in machine.tier:
        machine = machine.with_capacity(tier, None)
    timeline = Simulator(problem, machine).run(data.draw(plans(problem, machine, sensible=True)))
    # without lanes there may be no way to where an operand is needed
    linked = {(x.source, x.target) for x in machine.lanes}
    if ("host", DEVICE) in linked or len(machine.tiers) == 1:
        assert timeline.valid, timeline.violations


PROBLEM_VARIETY = {
    "in place": lambda p: any(set(o.reads) & set(o.writes) for o in p.ops),
    "an activation for backward": lambda p: any(
        p.tensor[t].kind == "activation" for o in p.ops if o.phase == "backward" for t in o.reads
    ),
    "a state and an update on the host": lambda p: any(
        o.phase == "update"
        and o.host_duration_us is not None
        and any(p.tensor[t].kind == "state" for t in o.reads)
        for o in p.ops
    ),
    "direct": lambda p: any(o.direct for o in p.ops),
    "recompute": lambda p: any(o.recompute and o.writes for o in p.ops),
    "ratios": lambda p: any(t.ratios for t in p.tensors),
    "nothing takes time or space": lambda p: (
        any(o.duration_us == 0 for o in p.ops) and any(t.nbytes == 0 for t in p.tensors)
    ),
    "steady": lambda p: p.steady,
    "an update between backward ops": lambda p: (
        "update,backward" in ",".join(o.phase for o in p.ops)
    ),
    "a gradient that outlives the step": lambda p: any(
        t.kind == "gradient" and p.must_survive(t.id) for t in p.tensors
    ),
} | {kind: lambda p, k=kind: any(t.kind == k for t in p.tensors) for kind in KINDS}


@pytest.mark.parametrize("what", PROBLEM_VARIETY)
def test_problems_are_various(what):
    found = find(problems(), PROBLEM_VARIETY[what], settings=SEEK)
    assert PROBLEM_VARIETY[what](found)
    assert len(found.ops) <= 7  # shrunk


MACHINE_VARIETY = {
    "disk": lambda m: "disk" in m.tier,
    "device alone": lambda m: len(m.tiers) == 1,
    "second lane": lambda m: len(m.lanes_between(DEVICE, "host")) == 2,
    "past the host": lambda m: bool(m.lanes_between(DEVICE, "disk")),
    "codec": lambda m: bool(m.codecs),
    "a limit": lambda m: m.tier[DEVICE].capacity_bytes is not None,
}


@pytest.mark.parametrize("what", MACHINE_VARIETY)
def test_machines_are_various(what):
    assert MACHINE_VARIETY[what](find(machines(), MACHINE_VARIETY[what], settings=SEEK))


PLAN_VARIETY = {
    "moves": lambda p: p.moves,
    "triggered by a move": lambda p: {m.start_after for m in p.moves} & {m.id for m in p.moves},
    "wraps": lambda p: any(m.wraps for m in p.moves),
    "codec": lambda p: any(m.codec for m in p.moves),
    "drops": lambda p: p.drops,
    "directs": lambda p: p.directs,
    "recomputes": lambda p: p.recomputes,
    "updates": lambda p: p.updates,
}


@pytest.mark.parametrize("what", PLAN_VARIETY)
@pytest.mark.parametrize("sensible", [True, False])
def test_plans_are_various(what, sensible):
    pairs = problems_with_machines()
    drawn = pairs.flatmap(lambda pm: plans(*pm, sensible=sensible))
    plan = find(drawn, lambda p: bool(PLAN_VARIETY[what](p)), settings=settings(SEEK, phases=FAST))
    assert PLAN_VARIETY[what](plan)


def test_the_least_plan_does_nothing():
    plan = find(problems_with_machines().flatmap(lambda pm: plans(*pm)), lambda p: True)
    assert not (plan.moves or plan.drops or plan.directs or plan.recomputes or plan.updates)


def test_without_hypothesis_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import offcompile.testing\n"
        "try: offcompile.testing.problems()\n"
        "except ImportError as e: print(e)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install offcompile[test]" in shown.stdout


def test_options_are_checked():
    with pytest.raises(ValueError, match="training"):
        problems(family="inference")
