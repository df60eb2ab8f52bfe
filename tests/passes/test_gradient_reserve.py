"""Gradient reserve: the knapsacks against the optimum, and where the gradients end up."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memferry_problems import apply, machine, makespan, stands_the_law, step

from offcompile.ir import HOST, Infeasible, Op, Plan, Problem
from offcompile.passes.gradient_reserve import (
    GradientReserve,
    reserve_dp,
    reserve_exact,
    reserve_ratio,
)
from offcompile.planning.planner import judge_for
from offcompile.testing import problems_with_machines

items = st.lists(st.tuples(st.integers(0, 30), st.integers(-5, 40)), max_size=9)
MIB = 1 << 20


def worth(chosen, gains):
    return sum(gains[n] for n in chosen)


def brute_force(sizes, gains, capacity):
    best = 0
    for mask in range(1 << len(sizes)):
        chosen = [n for n in range(len(sizes)) if mask >> n & 1]
        if sum(sizes[n] for n in chosen) <= capacity:
            best = max(best, worth(chosen, gains))
    return best


def instance(rng: random.Random, count: int, correlated: bool):
    sizes = [rng.randint(1 * MIB, 64 * MIB) for _ in range(count)]
    if correlated:
        return sizes, [s // 12 + rng.randint(0, 1_000_000) for s in sizes]
    return sizes, [rng.randint(1, 5_000_000) for _ in sizes]


@settings(max_examples=120, deadline=None)
@given(items, st.integers(0, 120))
def test_exact_and_a_table_by_bytes_are_the_optimum(pairs, capacity):
    sizes, gains = [s for s, _ in pairs], [g for _, g in pairs]
    optimum = brute_force(sizes, gains, capacity)
    for choose in (reserve_exact, lambda *a: reserve_dp(*a, quantum=1, fill=False)):
        chosen = choose(sizes, gains, capacity)
        assert worth(chosen, gains) == optimum
        assert sum(sizes[n] for n in chosen) <= capacity


@settings(max_examples=120, deadline=None)
@given(items, st.integers(0, 120), st.integers(1, 20))
def test_no_choice_overfills_or_takes_a_loss(pairs, capacity, quantum):
    sizes, gains = [s for s, _ in pairs], [g for _, g in pairs]
    for chosen in (
        reserve_ratio(sizes, gains, capacity),
        reserve_dp(sizes, gains, capacity, quantum),
        reserve_dp(sizes, gains, capacity, quantum, fill=False),
    ):
        assert sum(sizes[n] for n in chosen) <= capacity
        assert all(gains[n] > 0 for n in chosen)


@pytest.mark.parametrize(
    ("correlated", "fraction"),
    [
        (False, 0.5),
        (True, 0.9),
        *(pytest.param(*case, marks=pytest.mark.soak) for case in ((False, 0.1), (True, 0.1))),
    ],
)
def test_both_methods_are_within_three_per_mille_at_two_hundred(correlated, fraction):
    sizes, gains = instance(random.Random(int(fraction * 10)), 200, correlated)
    capacity = int(fraction * sum(sizes))
    optimum = worth(reserve_exact(sizes, gains, capacity), gains)
    for choose in (reserve_dp, reserve_ratio):
        assert worth(choose(sizes, gains, capacity), gains) >= 0.997 * optimum


def test_a_coarse_quantum_costs_what_the_notes_say():
    """Rounding sizes up to 64 MiB wastes a tenth; to 256 KiB next to nothing."""
    sizes, gains = instance(random.Random(4), 200, False)
    sizes = [8 * s for s in sizes]
    capacity = sum(sizes) // 2
    optimum = worth(reserve_exact(sizes, gains, capacity), gains)

    def loss(quantum: int) -> float:
        chosen = reserve_dp(sizes, gains, capacity, quantum, fill=False)
        return 1 - worth(chosen, gains) / optimum

    assert loss(64 * MIB) > 0.02
    assert loss(MIB) < 0.01
    filled = reserve_dp(sizes, gains, capacity, 64 * MIB)
    assert 1 - worth(filled, gains) / optimum < 0.003


# The pass


def in_place(plan: Plan) -> set[str]:
    return {d.tensor for d in plan.directs if d.tensor.startswith("g")}


def test_gradients_are_born_on_the_host_unless_reserved():
    problem = step([1000, 2000, 4000], updates=False)
    where = machine()
    assert in_place(apply(problem, where, "gradient_reserve:reserve=0")) == {"g0", "g1", "g2"}
    assert in_place(apply(problem, where, "gradient_reserve:reserve=1")) == set()
    # gains are proportional to bytes here: half of 7,000 bytes holds the first two
    half = apply(problem, where, "gradient_reserve:reserve=0.5")
    assert in_place(half) == {"g2"}
    assert makespan(problem, where, half) > 0


def test_a_larger_reserve_is_never_slower():
    problem, where = step([1000, 2000, 4000, 3000], updates=False), machine()
    times = [
        makespan(problem, where, apply(problem, where, f"gradient_reserve:reserve={r / 4}"))
        for r in range(5)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_without_a_factor_as_much_stays_as_fits():
    problem = step([1000, 1000, 1000, 1000], updates=False, steady=False)
    assert in_place(apply(problem, machine(), "gradient_reserve")) == set()
    # weights leave no place for all gradients beside them, and there is one for some
    where = machine(device=6_100)
    plan = apply(problem, where, "gradient_reserve")
    assert 0 < len(in_place(plan)) < 4
    makespan(problem, where, plan)


def test_places_are_shared_over_time():
    """Each gradient dies before the next is born: a peak of one, though the sum is three."""
    problem = step([1000, 1000, 1000], steady=False)
    forward = [o for o in problem.ops if o.phase == "forward"]
    ops = list(forward)
    for i in (2, 1, 0):
        ops += [problem.op[f"B{i}"], problem.op[f"U{i}"]]
    problem = Problem(problem.tensors, tuple(ops))
    where = machine(device=10_200)  # weights and states: 9,000
    plan = apply(problem, where, "gradient_reserve")
    assert in_place(plan) == set()
    makespan(problem, where, plan)


def test_a_gradient_that_cannot_be_written_in_place_is_moved_out():
    problem = step([1000, 1000], updates=False, steady=False)
    ops = tuple(
        Op(o.id, o.phase, o.duration_us, o.reads, o.writes, direct={}) if o.id == "B1" else o
        for o in problem.ops
    )
    problem = Problem(problem.tensors, ops)
    plan = apply(problem, machine(), "gradient_reserve:reserve=0")
    assert in_place(plan) == {"g0"}
    assert [(m.tensor, m.target) for m in plan.moves if m.tensor == "g1"] == [("g1", HOST)]
    makespan(problem, machine(), plan)


def test_a_reserve_that_does_not_fit_gives_way():
    problem = step([1000, 1000, 1000], updates=False, steady=False)
    where = machine(device=2_050)
    plan = apply(problem, where, "gradient_reserve:reserve=1")
    makespan(problem, where, plan)


def test_infeasible_names_the_missing_bytes():
    problem = step([1000], updates=False)
    with pytest.raises(Infeasible) as caught:
        apply(problem, machine(device=15), "gradient_reserve")
    assert caught.value.needed_bytes == 5


def test_decisions_of_an_earlier_plan_are_kept():
    problem, where = step([1000, 3000]), machine()
    before = apply(problem, where, "near_memory_update:where=host")
    after = GradientReserve(reserve=0, judge=judge_for(problem, where)).apply(
        problem, where, before
    )
    assert after.updates == before.updates
    assert in_place(after) == {"g0", "g1"}
    makespan(problem, where, after)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"method": "best"}, "must be one of dp, ratio"), ({"reserve": 1.5}, "between 0 and 1")],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GradientReserve(**options)


@settings(max_examples=40, deadline=None)
@given(
    problems_with_machines(),
    st.sampled_from(("", ":method=ratio", ":reserve=0", ":reserve=0.5,method=ratio")),
)
def test_any_problem_gets_a_lawful_plan_or_a_reason(both, options):
    stands_the_law(*both, f"gradient_reserve{options}")
