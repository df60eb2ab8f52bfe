"""Traces on a machine: what the policies miss, and what the simulator of traces promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import some

from benchmarks import traces
from offcompile.ir import DEVICE, HOST, InvalidInput, Lane, Machine, Tier
from offcompile.ir.trace import Block, Run, Trace
from offcompile.simulate.trace_policies import TRACE_POLICIES
from offcompile.simulate.trace_run import TraceResult

POLICY = {policy.name: policy for policy in TRACE_POLICIES}
STEPS = 50


def run(policy: str, trace: Trace, link: float = 25_000.0, share: float = 0.5) -> TraceResult:
    return POLICY[policy].run(trace, traces.half(trace, link, share))


def compute_us(trace: Trace) -> float:
    return sum(r.duration_us for r in trace.runs)


def device(capacity: int, rate: float = 10.0, latency_us: float = 0.0) -> Machine:
    lanes = (
        Lane("h2d", HOST, DEVICE, rate, latency_us),
        Lane("d2h", DEVICE, HOST, rate, latency_us),
    )
    return Machine((Tier(DEVICE, capacity), Tier(HOST)), lanes)


# --- the figures that it must show -------------------------------------------------------------


@pytest.mark.parametrize("make", [traces.repeat, traces.evaluate_every_4])
def test_what_repeats_is_there_when_it_is_needed(make: Callable[[int], Trace]) -> None:
    trace = make(STEPS)
    ours, lru = run("correlation", trace), run("lru", trace)
    assert ours.miss_rate <= 0.02 < 0.35 < lru.miss_rate
    assert ours.makespan_us <= 1.01 * compute_us(trace)
    assert ours.makespan_us >= compute_us(trace)


@pytest.mark.parametrize("share", some([0.35, 0.5], 0.35))
@pytest.mark.parametrize(
    "make",
    [
        traces.repeat,
        traces.evaluate_every_4,
        traces.alternating,
        traces.variable_lengths,
        traces.random_embedding,
    ],
)
def test_never_worse_than_least_recently_used(make: Callable[[int], Trace], share: float) -> None:
    trace = make(STEPS)
    ours, lru = run("correlation", trace, share=share), run("lru", trace, share=share)
    assert ours.miss_rate <= lru.miss_rate
    assert ours.makespan_us <= lru.makespan_us


@pytest.mark.parametrize("seed", some(range(3), 0))
@pytest.mark.parametrize("make", [traces.adversarial, traces.deceiving])
def test_where_there_is_little_to_learn_little_is_lost(
    make: Callable[[int, int], Trace], seed: int
) -> None:
    trace = make(600, seed)
    for link in (25_000.0, 8_000.0):
        ours, lru = run("correlation", trace, link), run("lru", trace, link)
        assert ours.makespan_us <= 1.03 * lru.makespan_us


def test_one_id_for_all_layers_puts_a_floor_under_misses() -> None:
    trace = traces.repeat(STEPS)
    shared, ours = run("printed_shared_ids", trace), run("correlation", trace)
    assert shared.miss_rate > 0.3 > 10 * ours.miss_rate


def test_without_a_bound_by_bytes_blocks_push_each_other_out() -> None:
    trace = traces.repeat(STEPS)
    printed, ours = run("printed", trace), run("correlation", trace)
    assert printed.counters.wasted_bytes > 5 * ours.counters.wasted_bytes
    assert printed.miss_rate > 3 * ours.miss_rate


def test_belady_misses_least_of_those_on_demand_and_the_oracle_least_of_all() -> None:
    trace = traces.repeat(STEPS)
    missed = [run(p, trace).counters.misses for p in ("oracle", "belady", "lru")]
    assert missed == sorted(missed) and len(set(missed)) == 3


# --- small cases --------------------------------------------------------------------------------


def small(*runs: Run, nbytes: int = 100) -> Trace:
    names = dict.fromkeys(b for r in runs for b in r.touched)
    return Trace(tuple(Block(name, nbytes) for name in names), runs)


def test_a_missing_block_costs_its_transfer() -> None:
    trace = small(Run("A", 50.0, reads=("a",)), Run("B", 50.0, reads=("b",)))
    got = POLICY["lru"].run(trace, device(200, latency_us=1.0))
    assert got.makespan_us == 50 + 50 + 11 + 11
    assert (got.counters.misses, got.bytes_in, got.bytes_out) == (2, 200, 0)
    known = POLICY["oracle"].run(trace, device(200, latency_us=1.0))
    assert known.makespan_us == 50 + 50 + 11  # the second comes while the first computes


def test_a_changed_block_leaves_before_its_room_is_free() -> None:
    trace = small(Run("A", 5.0, reads=("a",), writes=("a",)), Run("B", 5.0, reads=("b",)))
    got = POLICY["lru"].run(trace, device(100))
    assert got.makespan_us == 10 + 5 + 10 + 10 + 5
    assert (got.bytes_in, got.bytes_out, got.peak_bytes) == (200, 100, 100)


def test_a_dead_block_is_never_written_back() -> None:
    trace = small(
        Run("A", 5.0, writes=("a",)),
        Run("B", 5.0, reads=("a",), dead=("a",)),
        Run("C", 5.0, reads=("c",)),
    )
    got = POLICY["lru"].run(trace, device(100))
    assert (got.makespan_us, got.bytes_out) == (15 + 10, 0)
    assert got.counters.invalidated_bytes == 100


def test_a_run_that_cannot_fit_is_refused_with_the_bytes() -> None:
    trace = small(Run("A", 5.0, reads=("a", "b")))
    with pytest.raises(InvalidInput, match=r"200 bytes and the device holds 150"):
        POLICY["lru"].run(trace, device(150))
    with pytest.raises(InvalidInput, match=r"one lane from host to device"):
        POLICY["lru"].run(trace, Machine((Tier(DEVICE, 500), Tier(HOST))))


# --- any trace ----------------------------------------------------------------------------------


@st.composite
def any_traces(draw: st.DrawFn) -> tuple[Trace, Machine]:
    sizes = draw(st.lists(st.integers(1, 50), min_size=1, max_size=8))
    blocks = tuple(Block(f"b{i}", nbytes) for i, nbytes in enumerate(sizes))
    runs: list[Run] = []
    dead: set[str] = set()
    for _ in range(draw(st.integers(1, 40))):
        some = draw(st.lists(st.sampled_from(blocks), max_size=3, unique=True))
        reads = tuple(b.id for b in some if b.id not in dead and draw(st.booleans()))
        writes = tuple(b.id for b in some if b.id not in reads or draw(st.booleans()))
        gone = tuple(b for b in (*reads, *writes) if draw(st.integers(0, 5)) == 0)
        dead = (dead - set(writes)) | set(gone)
        graph = f"g{draw(st.integers(0, 3))}"
        runs.append(Run(graph, float(draw(st.integers(0, 20))), None, reads, writes, gone))
    trace = Trace(blocks, tuple(runs))
    capacity = trace.largest_run_bytes + draw(st.integers(0, 120))
    return trace, device(max(1, capacity), float(draw(st.integers(1, 30))))


@pytest.mark.parametrize("policy", POLICY)
@given(case=any_traces())
@settings(max_examples=25, deadline=None)
def test_any_trace_ends_within_the_budget_and_always_alike(
    policy: str, case: tuple[Trace, Machine]
) -> None:
    trace, machine = case
    got = POLICY[policy].run(trace, machine)
    assert got.peak_bytes <= (machine.tier[DEVICE].capacity_bytes or 0)
    assert got.makespan_us == pytest.approx(compute_us(trace) + got.stall_us)
    read = sum(len(dict.fromkeys(r.reads)) for r in trace.runs)
    assert got.counters.touches == read
    assert got.counters.wasted_bytes <= got.counters.prefetched_bytes <= got.bytes_in
    assert POLICY[policy].run(trace, machine) == got
