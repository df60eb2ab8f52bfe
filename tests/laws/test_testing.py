"""The strategies: lawful ids, all the variety they promise, and plans that are worth their name."""

import subprocess
import sys

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from offcompile.ir import DEVICE, HOST, KINDS, SELF_ENDING_KINDS
from offcompile.ir.jsonio import (
    check_homes,
    machine_from_json,
    machine_to_json,
    problem_from_json,
    problem_to_json,
)
from offcompile.simulate import simulate
from offcompile.testing import machines, plans, problems, problems_with_machines

NO_HURRY = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


@st.composite
def everything(draw):
    problem, machine = draw(problems_with_machines())
    sensible = draw(plans(problem, machine, sensible=True))
    return problem, machine, sensible, draw(plans(problem, machine, sensible=False))


@pytest.fixture(scope="module")
def sample():
    """The same couple of hundred draws for every test: drawing is what takes the time."""
    drawn = []

    @settings(NO_HURRY, max_examples=200, derandomize=True, phases=[Phase.generate])
    @given(everything())
    def collect(one):
        drawn.append(one)

    collect()
    return drawn


def test_problems_and_machines_are_lawful_and_suit_each_other(sample):
    for problem, machine, _, _ in sample:
        assert problem_from_json(problem_to_json(problem)) == problem
        assert machine_from_json(machine_to_json(machine)) == machine
        assert check_homes(problem, machine) == ()
        assert all(c in machine.codec for t in problem.tensors for c in t.ratios)


def test_every_read_finds_a_value(sample):
    for problem, *_ in sample:
        steady = problem.steady
        there = {
            t.id
            for t in problem.tensors
            if (t.kind not in SELF_ENDING_KINDS if steady else t.home is not None)
        }
        for op in problem.ops:
            assert set(op.reads) <= there
            there |= set(op.writes)
        assert steady or there == set(problem.tensor)


def test_plans_name_only_what_exists(sample):
    for problem, machine, *both in sample:
        for plan in both:
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
            assert {d.op for d in plan.directs} <= set(problem.op)
            assert {d.tensor for d in plan.directs} <= set(problem.tensor)
            assert {r.op for r in plan.recomputes} <= set(problem.op)
            assert {u.weight for u in plan.updates} <= set(problem.tensor)


def roomy(machine):
    for tier in machine.tier:
        machine = machine.with_capacity(tier, None)
    return machine


@settings(NO_HURRY, max_examples=40)
@given(st.data())
def test_sensible_plans_are_valid_where_there_is_room(data):
    problem, machine = data.draw(problems_with_machines())
    plan = data.draw(plans(problem, machine, sensible=True))
    assert simulate(problem, roomy(machine), plan).violations == ()


def test_senseless_plans_are_mostly_invalid_and_break_many_rules(sample):
    timelines = [simulate(p, roomy(m), senseless) for p, m, _, senseless in sample]
    rules = {v.rule for t in timelines for v in t.violations}
    assert sum(t.valid for t in timelines) < len(sample) / 2
    assert "missing-copy" in rules and len(rules) >= 6


def reads_a(kind, phase):
    return lambda p: any(
        p.tensor[t].kind == kind for o in p.ops if o.phase == phase for t in o.reads
    )


PROBLEM_VARIETY = {
    "in place": lambda p: any(set(o.reads) & set(o.writes) for o in p.ops),
    "an activation for backward": reads_a("activation", "backward"),
    "a state for an update": reads_a("state", "update"),
    "an update on the host": lambda p: any(o.host_duration_us is not None for o in p.ops),
    "direct": lambda p: any(o.direct for o in p.ops),
    "workspace": lambda p: any(o.workspace_bytes for o in p.ops),
    "recompute": lambda p: any(o.recompute and o.writes for o in p.ops),
    "ratios": lambda p: any(t.ratios for t in p.tensors),
    "no time": lambda p: any(o.duration_us == 0 for o in p.ops),
    "no space": lambda p: any(t.nbytes == 0 for t in p.tensors),
    "steady": lambda p: p.steady,
    "not steady": lambda p: not p.steady,
    "update, then backward": lambda p: "update,backward" in ",".join(o.phase for o in p.ops),
    "three layers": lambda p: {"F2", "B2"} <= set(p.op),
    "tied weights": lambda p: "F1" in p.op and "w1" not in p.tensor,
    "a gradient that outlives the step": lambda p: any(
        t.kind == "gradient" and p.must_survive(t.id) for t in p.tensors
    ),
    **{kind: lambda p, kind=kind: any(t.kind == kind for t in p.tensors) for kind in KINDS},
}
MACHINE_VARIETY = {
    "disk": lambda m: "disk" in m.tier,
    "device alone": lambda m: len(m.tiers) == 1,
    "two lanes side by side": lambda m: len(m.lanes_between(DEVICE, HOST)) == 2,
    "past the host": lambda m: bool(m.lanes_between(DEVICE, "disk")),
    "codec": lambda m: bool(m.codecs),
    "limited": lambda m: m.tier[DEVICE].capacity_bytes is not None,
    "unlimited": lambda m: m.tier[DEVICE].capacity_bytes is None,
    "host limited": lambda m: HOST in m.tier and m.tier[HOST].capacity_bytes is not None,
}
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


@pytest.mark.parametrize("what", PROBLEM_VARIETY)
def test_problems_are_various(sample, what):
    assert any(PROBLEM_VARIETY[what](problem) for problem, *_ in sample)


@pytest.mark.parametrize("what", MACHINE_VARIETY)
def test_machines_are_various(sample, what):
    assert any(MACHINE_VARIETY[what](machine) for _, machine, *_ in sample)


@pytest.mark.parametrize("what", PLAN_VARIETY)
def test_plans_are_various(sample, what):
    assert any(PLAN_VARIETY[what](sensible) for *_, sensible, _ in sample)
    assert any(PLAN_VARIETY[what](senseless) for *_, senseless in sample)


QUICK = settings(NO_HURRY, max_examples=500, report_multiple_bugs=False)


def test_failures_shrink_to_the_smallest_case():
    for family, tensors, ops in (("any", 1, 1), ("training", 6, 4)):
        drawn = problems(family=family)
        problem = find(drawn, lambda p: any(t.kind == "state" for t in p.tensors), settings=QUICK)
        assert (len(problem.tensors), len(problem.ops)) == (tensors, ops)
        assert problem.tensors[0].nbytes == problem.ops[0].duration_us == 0


def test_the_simplest_draw_does_nothing():
    @settings(NO_HURRY, max_examples=1, phases=[Phase.generate])
    @given(problems_with_machines().flatmap(lambda pair: plans(*pair)))
    def check(plan):
        assert not (plan.moves or plan.drops or plan.directs or plan.recomputes or plan.updates)

    check()


def test_options_are_kept():
    @settings(NO_HURRY, max_examples=15, derandomize=True)
    @given(problems(steady=True, family="training", max_layers=1, tiers=("disk",), codecs=()))
    def check_problem(problem):
        assert problem.steady and {"F0", "L", "B0"} <= set(problem.op) <= {"F0", "L", "B0", "U0"}
        assert {t.home for t in problem.tensors} == {None, "disk"}
        assert not any(t.ratios for t in problem.tensors)

    @settings(NO_HURRY, max_examples=15, derandomize=True)
    @given(machines(disk=True, codecs=("zip",), capacities=st.just(7)))
    def check_machine(machine):
        assert [t.capacity_bytes for t in machine.tiers] == [7, 7, 7]
        assert {c.name for c in machine.codecs} <= {"zip"}

    check_problem()
    check_machine()
    with pytest.raises(ValueError, match="training"):
        problems(family="inference")


def test_without_hypothesis_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['hypothesis'] = None\n"
        "import offcompile.testing\n"
        "try: offcompile.testing.problems()\n"
        "except ImportError as e: print(e)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install offcompile[test]" in shown.stdout
