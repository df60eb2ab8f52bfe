"""Selection against an exact model, and the pass against the simulator."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import some

from benchmarks.activation_chain import chain
from benchmarks.activation_selection import exact, makespan_ns, random_instance
from offcompile.ir import Infeasible, Machine, Plan, Problem, Timeline
from offcompile.passes.activation_spill import ActivationSpill
from offcompile.passes.select.activation_selection import (
    Candidate,
    Option,
    by_benefit,
    by_makespan,
    lane_times,
    missing_bytes,
    printed,
    transfer_ns,
)
from offcompile.passes.select.cover.intervals import CoverItem, CoverWay
from offcompile.passes.select.cover.knapsack import knapsack
from offcompile.passes.select.cover.search import cover
from offcompile.simulate import Simulator


def judge(problem: Problem, machine: Machine, plan: Plan) -> Timeline:
    return Simulator(problem, machine).run(plan)


def tensor(name: str, nbytes: int, release: int, moved: int | None = None) -> Candidate:
    """One nanosecond a byte; away from its release to the turn at 10 and as far beyond it."""
    options = [Option("disk", "disk", "disk", nbytes, nbytes, nbytes, release, 20 - release)]
    if moved is not None:
        way = (release, 20 - release, 0, True)
        options.append(Option("disk+bitmask", "disk", "disk", moved, moved, moved, *way))
    return Candidate(name, nbytes, release, 20 - release, tuple(options))


# ---- FlashNeuron §3.3 by hand -------------------------------------------------------------


def names(candidates: Sequence[Candidate], choice: Sequence[int | None]) -> list[str]:
    taken = zip(candidates, choice, strict=True)
    return [f"{c.id}:{c.options[o].name}" for c, o in taken if o is not None]


def test_phase_one_takes_from_the_beginning_until_sums_fit() -> None:
    candidates = [tensor(n, 4, i) for i, n in enumerate("ABCD")]
    assert names(candidates, printed(candidates, 7, 100)) == ["A:disk", "B:disk"]


def test_phase_two_replaces_the_last_uncompressible_by_the_most_compressible() -> None:
    candidates = [tensor("A", 4, 0), tensor("B", 4, 1), tensor("C", 4, 2, 3), tensor("D", 4, 3, 1)]
    # A and B need 8 ns of 6: B gives way to D, which is enough (4 + 1)
    assert names(candidates, printed(candidates, 8, 6)) == ["A:disk", "D:disk+bitmask"]
    # with 4 ns for the forward pass A gives way to C as well
    assert names(candidates, printed(candidates, 8, 4)) == ["C:disk+bitmask", "D:disk+bitmask"]


def test_phase_two_stops_when_nothing_compressible_is_left() -> None:
    candidates = [tensor("A", 4, 0), tensor("B", 4, 1), tensor("C", 3, 2, 1)]
    assert names(candidates, printed(candidates, 8, 2)) == ["A:disk", "B:disk"]


def test_whether_phase_one_counts_compressed_time_is_an_option() -> None:
    candidates = [tensor("A", 4, 0, 2), tensor("B", 4, 1), tensor("C", 4, 2, 1)]
    raw = printed(candidates, 8, 6, phase1_time="raw")
    compressed = printed(candidates, 8, 6, phase1_time="compressed")
    # with compression the two take 2 + 4 ns and fit; so phase 2 changes nothing either way
    assert names(candidates, raw) == names(candidates, compressed) == ["A:disk+bitmask", "B:disk"]


def test_half_precision_counts_as_compressible_only_when_asked() -> None:
    half = Option("disk+fp16", "disk", "disk", 2, 2, 2, 1, 19, compressed=True)
    a, b = tensor("A", 4, 0), tensor("B", 4, 1)
    b = Candidate(b.id, b.nbytes, b.release_ns, b.needed_ns, (*b.options, half))
    assert names([a, b], printed([a, b], 4, 3)) == ["A:disk"]
    assert names([a, b], printed([a, b], 4, 3, fp16_counts=True)) == ["B:disk+fp16"]


# ---- the lane model -----------------------------------------------------------------------


def test_lane_times_by_hand() -> None:
    candidates = [tensor("A", 4, 0), tensor("B", 4, 8)]
    # out: A 0 to 4, B 8 to 12, two late; back: B (needed at 12) from 10 to 14, two late
    assert lane_times(candidates, (0, 0), 10, 10).makespan_ns == 24
    assert lane_times(candidates, (0, None), 10, 10).makespan_ns == 20
    assert lane_times(candidates, (None, None), 10, 10).late_out is None
    assert lane_times(candidates, (0, 0), 10, 10).late_out == ("disk", 8)


def test_one_that_leaves_in_time_is_preferred_to_one_that_is_as_cheap() -> None:
    candidates = [tensor("late", 4, 8), tensor("early", 4, 0)]
    need = [0] * 10 + [4] + [0] * 10
    assert by_makespan(candidates, need, 10, 10) == (None, 0)


# ---- covering -----------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(SIZES, st.integers(1, 200))
def test_knapsack_is_exact_on_small_cases(things: list[tuple[int, int]], need: int) -> None:
    sizes, costs = [s for s, _ in things], [float(c) for _, c in things]
    picked = knapsack(sizes, costs, need)
    subsets = itertools.product((0, 1), repeat=len(things))
    best = min(
        (
            sum(c for c, x in zip(costs, s, strict=True) if x)
            for s in subsets
            if sum(n for n, x in zip(sizes, s, strict=True) if x) >= need
        ),
        default=None,
    )
    if best is None:
        assert picked == list(range(len(things)))
    else:
        assert sum(sizes[i] for i in picked) >= need
        assert sum(costs[i] for i in picked) == pytest.approx(best, rel=1e-3)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_cover_is_exact_on_small_cases(data: st.DataObject) -> None:
    need = data.draw(st.lists(st.integers(-3, 20), min_size=1, max_size=6))
    spans = st.tuples(st.integers(1, 15), st.integers(0, 5), st.integers(0, 5), st.integers(1, 30))
    drawn = data.draw(st.lists(spans, max_size=6))
    last = len(need) - 1
    items = [
        CoverItem(n, (CoverWay(min(a, b, last), min(max(a, b), last), float(c)),))
        for n, a, b, c in drawn
    ]

    def covers(taken: Sequence[int]) -> bool:
        return all(
            sum(
                x.nbytes
                for x, t in zip(items, taken, strict=True)
                if t and x.ways[0].first <= p <= x.ways[0].last
            )
            >= n
            for p, n in enumerate(need)
        )

    def cost(taken: Sequence[int | None]) -> float:
        return sum(x.ways[0].cost for x, t in zip(items, taken, strict=True) if t)

    best = min(
        (cost(t) for t in itertools.product((0, 1), repeat=len(items)) if covers(t)), default=None
    )
    choice = cover(items, need)
    if best is None:
        assert choice is None
    else:
        assert choice is not None
        taken = [0 if w is None else 1 for w in choice]
        assert covers(taken)
        assert cost(taken) == best


def test_a_full_tier_sends_the_rest_to_the_next() -> None:
    def item(cheap: float, dear: float) -> CoverItem:
        return CoverItem(10, (CoverWay(0, 0, cheap, "host", 10), CoverWay(0, 0, dear, "disk", 10)))

    # both are needed and the host takes one: the one that loses more by going to disk
    assert cover([item(1, 3), item(1, 9)], [20], {"host": 10}) == (1, 0)
    assert cover([item(1, 3), item(1, 9)], [20], {"host": 10, "disk": 0}) is None


@pytest.mark.parametrize("count", some([10, 25, 50, 100, 200], 10, 50))
def test_selection_is_within_one_percent_of_the_exact_optimum(count: int) -> None:
    for seed in range(3 if count < 100 else 1):
        case = random_instance(1000 + seed, count)
        cheap = by_benefit(case.candidates, case.excess)
        fast = by_makespan(case.candidates, case.excess, case.forward_ns, case.backward_ns)
        assert cheap is not None
        assert fast is not None
        for choice in (cheap, fast):
            assert missing_bytes(case.candidates, choice, case.excess) == 0
        best = exact(case, "transfer")
        assert best * 0.999 <= transfer_ns(case.candidates, cheap) <= best * 1.01
        best = exact(case, "makespan")
        assert best * 0.999 <= makespan_ns(case, fast) <= best * 1.01


# ---- the pass -----------------------------------------------------------------------------

VARIANTS = [
    ActivationSpill(judge=judge),
    ActivationSpill(variant="printed", judge=judge),
    ActivationSpill(lossy=True, judge=judge),
    ActivationSpill(recompute=True, judge=judge),
    ActivationSpill(tiers="disk", judge=judge),
    ActivationSpill(),
]


def test_nothing_moves_when_everything_fits() -> None:
    problem, machine = chain(6, fraction=1.0)
    for policy in VARIANTS:
        plan = policy.apply(problem, machine, Plan())
        assert not plan.moves
        assert not plan.recomputes


@settings(max_examples=60, deadline=None)
@given(
    st.integers(2, 9),
    st.integers(0, 10**6),
    st.sampled_from([0.0, 0.2, 0.4, 0.8]),
    st.sampled_from([0.3, 1.0, 3.0]),
    st.sampled_from([None, 0.0, 0.4, 1.2]),
    st.booleans(),
    st.booleans(),
    st.sampled_from(VARIANTS),
)
def test_a_legal_plan_or_infeasible(
    layers: int,
    seed: int,
    fraction: float,
    load: float,
    host_share: float | None,
    disk: bool,
    steady: bool,
    policy: ActivationSpill,
) -> None:
    problem, machine = chain(
        layers, seed, load=load, fraction=fraction, host_share=host_share, disk=disk, steady=steady
    )
    try:
        plan = policy.apply(problem, machine, Plan())
    except Infeasible as error:
        assert error.needed_bytes is None or error.needed_bytes > 0
        assert error.smallest_change
        return
    timeline = judge(problem, machine, plan)
    if policy.judge is not None or machine.tier["host"].capacity_bytes is None:
        assert timeline.valid, timeline.violations
    kinds = {problem.tensor[m.tensor].kind for m in plan.moves}
    assert kinds <= {"activation"}
    if not policy.lossy:
        assert all(m.codec != "fp16" for m in plan.moves)
    assert policy.recompute or not plan.recomputes
    assert plan == policy.apply(problem, machine, Plan())


def makespan_us(policy: ActivationSpill, problem: Problem, machine: Machine) -> float:
    return judge(problem, machine, policy.apply(problem, machine, Plan())).makespan_us


def test_benefit_is_no_slower_than_printed_and_recomputation_only_helps() -> None:
    for seed in range(3):
        problem, machine = chain(14, seed, load=2.0)
        ours = makespan_us(ActivationSpill(judge=judge), problem, machine)
        theirs = makespan_us(ActivationSpill(variant="printed", judge=judge), problem, machine)
        mixed = makespan_us(ActivationSpill(recompute=True, judge=judge), problem, machine)
        assert ours <= theirs * 1.0001
        assert mixed <= ours


def test_transfers_are_hidden_where_the_lanes_allow() -> None:
    problem, machine = chain(40, 3, load=0.5)
    compute_us = sum(op.duration_us for op in problem.ops)
    made = makespan_us(ActivationSpill(judge=judge), problem, machine)
    assert made == pytest.approx(compute_us, rel=1e-3)


def test_a_floor_that_no_activation_can_lower_is_infeasible_by_its_bytes() -> None:
    problem, machine = chain(6)
    tiny = machine.with_capacity("device", 10_000)
    with pytest.raises(Infeasible) as caught:
        ActivationSpill(judge=judge).apply(problem, tiny, Plan())
    missing = caught.value.needed_bytes
    assert missing is not None
    assert f"{10_000 + missing:,} bytes" in caught.value.smallest_change
    enough = machine.with_capacity("device", 10_000 + missing)
    plan = ActivationSpill(judge=judge).apply(problem, enough, Plan())
    assert judge(problem, enough, plan).valid
    less = machine.with_capacity("device", 10_000 + missing - 1)
    with pytest.raises(Infeasible):
        ActivationSpill(judge=judge).apply(problem, less, Plan())


def test_unknown_options_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="variant is 'best'; it must be one of benefit, printed"):
        ActivationSpill(variant="best")
    with pytest.raises(ValueError, match="tiers is 'tape'"):
        ActivationSpill(tiers="tape")
