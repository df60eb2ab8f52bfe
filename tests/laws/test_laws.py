"""Laws that every registered policy keeps, on problems that hypothesis draws."""

from __future__ import annotations

import random

import pytest
from chains import random_chain
from hypothesis import given, settings
from hypothesis import strategies as st

from offcompile.bounds import lower_bound
from offcompile.ir import Infeasible, Plan
from offcompile.passes.registry import POLICIES, make
from offcompile.passes.search.least_memory import least_bytes
from offcompile.planning.planner import certify, check_plan, judge_for
from offcompile.testing import plans, problems_with_machines

#: every policy, with the variants that follow the papers
SPECS = [
    "joint:evaluations=150,seconds=60",
    "weight_rotation",
    "weight_rotation:variant=printed",
    "weight_rotation:variant=printed_once",
    "weight_rotation:variant=l2l",
    "weight_rotation:variant=spread",
    "hybrid_access",
    "hybrid_access:variant=printed",
    "hybrid_access:variant=repaired",
    "hybrid_access:variant=zero_offload",
    "hybrid_access:variant=load_all",
    "gradient_reserve",
    "gradient_reserve:reserve=0.4,method=ratio",
    "activation_spill",
    "activation_spill:variant=printed",
    "near_memory_update",
    "recompute",
    "recompute:variant=all",
    "turnover",
    "correlation_prefetch",
    "correlation_prefetch:variant=oracle",
    "correlation_prefetch:variant=belady",
    "correlation_prefetch:variant=lru",
]


def apply(spec, problem, machine):
    """(plan, timeline), or None where the policy says that it cannot be done."""
    try:
        plan = make(spec, judge_for(problem, machine)).apply(problem, machine, Plan())
    except Infeasible as error:
        assert error.reason and error.smallest_change
        assert error.needed_bytes is None or error.needed_bytes > 0
        return None
    try:
        return plan, certify(problem, machine, plan, spec)
    except Infeasible as error:
        # only tiers beyond the device can surprise the builder
        assert any(t.capacity_bytes is not None for t in machine.tiers[1:]), error
        return None


def test_every_policy_is_covered_here():
    assert {spec.partition(":")[0] for spec in SPECS} == set(POLICIES)


@pytest.mark.parametrize("spec", SPECS)
@given(case=problems_with_machines())
@settings(max_examples=25)
def test_a_plan_is_lawful_and_fits_or_is_refused_with_figures(spec, case):
    problem, machine = case
    made = apply(spec, problem, machine)
    if made is None:
        return
    timeline = made[1]
    for tier in machine.tiers:
        assert tier.capacity_bytes is None or (
            timeline.peak_bytes[tier.name] <= tier.capacity_bytes
        )
    assert lower_bound(problem, machine, seconds=1.0).us <= timeline.makespan_us + 1e-9


@pytest.mark.parametrize("spec", SPECS)
def test_the_same_plan_twice(spec):
    problem, machine = random_chain(random.Random(3), 5, 0.4, 1.0)
    first, second = (apply(spec, problem, machine) for _ in range(2))
    assert (first is None) == (second is None)
    if first is not None:
        assert first[0] == second[0]


@given(st.integers(0, 10**6))
@settings(max_examples=12)
def test_joint_is_no_worse_than_any_single_policy(seed):
    rng = random.Random(seed)
    problem, machine = random_chain(rng, rng.randint(2, 6), rng.random(), rng.uniform(0.3, 1.5))
    joint = apply("joint:evaluations=150,seconds=60", problem, machine)
    for spec in SPECS[1:]:
        single = apply(spec, problem, machine)
        if single is not None:
            assert joint is not None
            assert joint[1].makespan_us <= single[1].makespan_us, spec


@given(st.integers(0, 10**6))
@settings(max_examples=12)
def test_more_memory_is_never_slower(seed):
    rng = random.Random(seed)
    problem, machine = random_chain(rng, rng.randint(2, 6), rng.uniform(0, 0.6), 1.2)
    tight = apply("joint:evaluations=300,seconds=60", problem, machine)
    more = int(machine.tier["device"].capacity_bytes * rng.uniform(1.0, 1.3))
    loose = apply(
        "joint:evaluations=300,seconds=60", problem, machine.with_capacity("device", more)
    )
    assert tight is not None and loose is not None
    assert loose[1].makespan_us <= tight[1].makespan_us * 1.01


@given(st.data())
@settings(max_examples=100)
def test_no_plan_takes_less_than_the_least_memory(data):
    problem, machine = data.draw(problems_with_machines())
    machine = machine.with_capacity("device", None)
    found = check_plan(problem, machine, data.draw(plans(problem, machine, sensible=True)))
    if found.valid:
        assert least_bytes(problem, machine) <= found.timeline.peak_bytes["device"]
