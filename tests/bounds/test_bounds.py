"""Lower bounds: exact on cases a person can check, below every valid plan, and monotone."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lengths import some
from oracle_cases import case

from offcompile import bounds
from offcompile.bounds import Bound, columns_of, floor_bytes, lower_bound, simple_lower_bound
from offcompile.bounds.moment.cut import cut_bound
from offcompile.bounds.program.grid import Grid, coarse, fine, full
from offcompile.bounds.program.merge import merged_tensors
from offcompile.bounds.program.model import BoundModel, build
from offcompile.bounds.program.solve import Answer, dual_bound, solve_lp, solve_milp
from offcompile.bounds.survey import Survey, survey
from offcompile.ir import Codec, Lane, Machine, Op, Problem, Tensor, Tier
from offcompile.simulate import simulate


def machine(
    capacity: int | None, rate: float = 10.0, host: int | None = None, **extra: float
) -> Machine:
    """A device and a host, joined both ways at `rate` bytes per µs."""
    lanes = (
        Lane("h2d", "host", "device", extra.get("h2d", rate)),
        Lane("d2h", "device", "host", extra.get("d2h", rate)),
    )
    return Machine((Tier("device", capacity), Tier("host", host)), lanes)


def op(
    name: str, us: float, reads: str = "", writes: str = "", work: int = 0, **more: object
) -> Op:
    phase = str(more.pop("phase", "forward"))
    return Op(name, phase, us, tuple(reads.split()), tuple(writes.split()), work, **more)  # type: ignore[arg-type]


def steady(tensors: Sequence[Tensor], *ops: Op) -> Problem:
    return Problem(tuple(tensors), ops, steady=True)


def weights(*sizes: int) -> list[Tensor]:
    return [Tensor(f"w{i}", size, "weight", "host") for i, size in enumerate(sizes)]


def close(bound: Bound, us: float) -> bool:
    """Just below the exact figure: margins only."""
    return us * (1 - 1e-5) - 0.01 <= bound.us <= us


# ---- cases checked by hand ---------------------------------------------------------------


def test_everything_fits_is_compute_exactly() -> None:
    p = steady(weights(50, 50), op("F0", 1.2345, "w0"), op("F1", 2.5, "w1"))
    bound = lower_bound(p, machine(100))
    assert (bound.us, bound.method, bound.complete) == (3.735, "compute", True)  # 1.2345 → 1235 ns
    assert not bound.away_hints


def test_two_weights_in_the_room_of_one_are_loaded_between_the_ops() -> None:
    """Never written, so never carried out; each load takes 10 µs and cannot overlap an op."""
    p = steady(weights(100, 100), op("F0", 10, "w0"), op("F1", 10, "w1"))
    bound = lower_bound(p, machine(100))
    assert close(bound, 40)
    assert bound.away_hints == pytest.approx({("w0", "F0"): 1.0, ("w1", "F1"): 1.0})


def test_a_weight_written_once_is_carried_out_once_for_two_loads() -> None:
    """The discount of "Weight Offloading Strategies" §3: after F the host copy is still good."""
    ops = (
        op("F", 10, "w0"),
        op("X", 10, work=100),
        op("B", 10, "w0", "w0"),
        op("Y", 10, work=100),
    )
    p = steady(weights(100), *ops)
    assert close(lower_bound(p, machine(100)), 40 + 2 * 10 + 10)
    assert close(lower_bound(p, machine(100, d2h=5)), 40 + 2 * 10 + 20)


def test_an_activation_spills_as_fast_as_the_link_allows() -> None:
    """a is out before X starts, and in only after X: 60 bytes each way at 10 bytes per µs."""
    p = steady(
        [Tensor("a", 60, "activation")],
        op("F", 3, "", "a"),
        op("X", 4, work=100),
        op("B", 5, "a"),
    )
    assert close(lower_bound(p, machine(100)), 12 + 6 + 6)
    assert close(lower_bound(p, machine(159)), 12 + 6 + 6)
    assert lower_bound(p, machine(160)).us == 12


def test_a_codec_or_a_second_lane_shortens_the_trip() -> None:
    a = Tensor("a", 60, "activation", ratios={"half": 0.5, "other": 0.1})
    p = steady([a], op("F", 3, "", "a"), op("X", 4, work=100), op("B", 5, "a"))
    m = machine(100)
    assert close(lower_bound(p, Machine(m.tiers, m.lanes, (Codec("half", False, 100),))), 18)
    assert close(lower_bound(p, Machine(m.tiers, m.lanes, (Codec("half", False, 12),))), 22)
    two = (*m.lanes, Lane("again", "host", "device", 20))
    assert lower_bound(p, Machine(m.tiers, two)).us <= 12 + 6 + 3


def test_direct_access_when_it_costs_less_than_the_load() -> None:
    """F1 reads w1 in place for 4 µs more, where making room and loading takes 20."""
    f1 = op("F1", 10, "w1", direct={"w1": 14})
    p = steady(weights(100, 100), op("F0", 10, "w0"), f1)
    assert close(lower_bound(p, machine(100)), 24)
    dear = steady(weights(100, 100), op("F0", 10, "w0"), op("F1", 10, "w1", direct={"w1": 99}))
    assert close(lower_bound(dear, machine(100)), 40)


def test_direct_access_that_is_quicker_is_credited_in_full() -> None:
    p = steady(weights(10), op("F", 10, "w0", direct={"w0": 2}))
    assert simple_lower_bound(p, machine(100)) == 2
    assert lower_bound(p, machine(100)).us <= 2
    nothing = steady(weights(10, 10), op("F", 10, "w0 w1", direct={"w0": 2, "w1": 1}))
    assert simple_lower_bound(nothing, machine(100)) == 0  # 10 − 8 − 9: never below 0
    no_host = Machine((Tier("device", 100),))
    assert simple_lower_bound(p, no_host) == 10


def test_recomputation_when_it_costs_less_than_the_spill() -> None:
    def chain(again: bool) -> Problem:
        return steady(
            [Tensor("a", 60, "activation")],
            op("F", 3, "", "a", recompute=again),
            op("X", 4, work=100),
            op("B", 5, "a"),
        )

    assert close(lower_bound(chain(True), machine(100)), 12 + 3)
    assert close(lower_bound(chain(False), machine(100)), 12 + 12)


def test_a_host_update_leaves_the_compute_lane() -> None:
    """A part u of the update on the host balances 22 − 10 u on one lane with 20 u on the other."""
    update = op("U", 10, "g", "w0", phase="update", host_duration_us=20)
    p = steady([*weights(10), Tensor("g", 10, "gradient")], op("F", 12, "w0", "g"), update)
    m = machine(100)
    assert simple_lower_bound(p, m) == pytest.approx(22 - 10 * 22 / 30, abs=1e-3)
    on_device = steady(p.tensors, p.ops[0], op("U", 10, "g", "w0", phase="update"))
    assert simple_lower_bound(on_device, m) == 22
    assert simple_lower_bound(p, m) <= lower_bound(p, m).us <= 22


def test_a_step_that_does_not_repeat_begins_with_everything_at_home() -> None:
    p = Problem((Tensor("w", 100, "weight", "host"),), (op("F", 5, "w"),))
    assert close(lower_bound(p, machine(None)), 15)
    at_home = Problem((Tensor("w", 100, "weight", "device"),), (op("F", 5, "w"),))
    assert lower_bound(at_home, machine(None)).us == 5


def test_a_home_on_disk_is_two_lanes_away() -> None:
    tiers = (Tier("device"), Tier("host"), Tier("disk"))
    lanes = (Lane("h2d", "host", "device", 10), Lane("read", "disk", "host", 5))
    p = Problem((Tensor("w", 100, "weight", "disk"),), (op("F", 5, "w"),))
    bound = lower_bound(p, Machine(tiers, lanes)).us
    assert (
        20 + 5 - 0.01 <= bound <= 20 + 10 + 5
    )  # the program lets the second hop overlap the first


def test_a_full_host_sends_the_rest_to_disk() -> None:
    """100 bytes must leave the device, 40 may stay on the host: the disk takes them or more."""
    slow = (Lane("write", "host", "disk", 1), Lane("read", "disk", "host", 1))
    tensors = [Tensor("a", 50, "activation"), Tensor("b", 50, "activation")]
    p = steady(tensors, op("F", 1, "", "a b"), op("X", 1, work=100), op("B", 1, "a b"))
    m = machine(100)

    def with_host(capacity: int | None) -> float:
        tiers = (Tier("device", 100), Tier("host", capacity), Tier("disk"))
        return lower_bound(p, Machine(tiers, (*m.lanes, *slow))).us

    assert with_host(None) == pytest.approx(23, abs=0.01)
    assert with_host(40) >= 60
    assert with_host(100) <= 23


def there_and_back(n: int, recompute: bool = False) -> Problem:
    """n activations of 100 bytes, made one after the other and read in the opposite order."""
    acts = tuple(Tensor(f"a{i}", 100, "activation") for i in range(n))
    there = [op(f"F{i}", 1, "", f"a{i}", recompute=recompute) for i in range(n)]
    back = [op(f"B{i}", 1, f"a{i}", phase="backward") for i in reversed(range(n))]
    return Problem(acts, (*there, *back))


def test_what_is_away_at_one_moment_goes_out_before_it_and_comes_back_after() -> None:
    """When F9 ends, 7 of 10 are away: 700 bytes go out before and back after, at 10 a µs."""
    p = there_and_back(10)
    assert cut_bound(survey(p, machine(300)), math.inf) == pytest.approx(140_000, rel=0.01)
    assert cut_bound(survey(p, machine(None)), math.inf) == 0  # nobody has to go
    slow_back = machine(300, h2d=5.0, d2h=10.0)
    assert cut_bound(survey(p, slow_back), math.inf) == pytest.approx(210_000, rel=0.01)


def test_where_nothing_can_be_loaded_a_moment_proves_nothing() -> None:
    p = Problem((Tensor("w", 100, "weight", "host"),), (op("F", 5, "w"),))
    assert cut_bound(survey(p, Machine((Tier("device", 100), Tier("host")))), math.inf) == 0


def test_what_is_computed_again_needs_no_way_out() -> None:
    """7 ops run once more, on the compute lane: cheaper than 20 µs of copies for each."""
    p = there_and_back(10, recompute=True)
    assert cut_bound(survey(p, machine(300)), math.inf) == pytest.approx(27_000, rel=0.05)


def test_problems_too_large_for_a_program_are_cut_once() -> None:
    """Ops that may run again keep tensors from being taken together."""
    bound = lower_bound(there_and_back(1500, recompute=True), machine(40_000), seconds=0.5)
    assert bound.method == "cut" and not bound.complete
    # how near it comes in the time is the machine's
    assert bound.us == pytest.approx(2 * 1500 + (1500 - 400), rel=0.1)


# ---- laws ----------------------------------------------------------------------------------


def every_bound(found: Survey) -> dict[str, float]:
    """All that any stage could prove, in ns."""
    ids = tuple(o.id for o in found.problem.ops)
    n = found.n_ops
    grids = {"1": coarse(found, 1), "2": coarse(found, 2), "fine": fine(found), "full": full(found)}
    answers: dict[str, Answer] = {}
    for name, grid in grids.items():
        answers[f"lp {name}"] = solve_lp(build(found, grid), ids, 5)
        answers[f"merged {name}"] = solve_lp(build(merged_tensors(found, grid), grid), ids, 5)
    if not found.problem.steady:
        answers["cut"] = Answer(cut_bound(found, math.inf), {}, True, False, 0.0)
    if n <= 6:
        answers["milp"] = solve_milp(build(found, full(found), whole=True), ids, 2)
    return {
        name: math.inf if a.infeasible else a.ns
        for name, a in answers.items()
        if a.ns is not None or a.infeasible
    }


@pytest.mark.parametrize("chunk", some(range(4), 0))
def test_no_valid_plan_beats_any_bound(chunk: int) -> None:
    """Random plans of every kind, on machines with no more room than they took."""
    checked = 0
    for seed in range(chunk * 30, chunk * 30 + 30):
        problem, roomy, plan = case(random.Random(seed))
        timeline = simulate(problem, roomy, plan, record=False)
        if not problem.ops or not timeline.valid or not timeline.settled:
            continue
        tight = roomy
        for tier in ("device", "host", "disk")[: 1 + seed % 3]:
            tight = tight.with_capacity(tier, timeline.peak_bytes[tier])
        makespan = simulate(problem, tight, plan, record=False).makespan_us
        assert simple_lower_bound(problem, tight) <= makespan
        assert floor_bytes(problem, tight).needed_bytes <= (
            tight.tier["device"].capacity_bytes or 0
        )
        found = survey(problem, tight)
        if not found.trivial:
            for name, ns in every_bound(found).items():
                assert ns <= makespan * 1000 * (1 + 1e-9) + 1, (seed, name)
        checked += 1
    assert checked >= 8


def training(sizes: Sequence[int], us: Sequence[int]) -> Problem:
    """Weights updated in place by their backward op, activations between."""
    layers = range(len(sizes))
    tensors = [*weights(*sizes), *(Tensor(f"a{i}", 10 + i, "activation") for i in layers)]
    ops = [op(f"F{i}", us[i], f"w{i}" + (f" a{i - 1}" if i else ""), f"a{i}") for i in layers]
    ops += [op(f"B{i}", 2 * us[i], f"w{i} a{i}", f"w{i}", work=sizes[i]) for i in reversed(layers)]
    return steady(tensors, *ops)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.integers(20, 90), min_size=2, max_size=3),
    st.lists(st.integers(1, 9), min_size=3, max_size=3),
    st.integers(0, 60),
    st.sampled_from([2.0, 5.0, 20.0]),
)
def test_more_room_or_a_faster_link_never_raises_the_bound(
    sizes: list[int], us: list[int], spare: int, rate: float
) -> None:
    p = training(sizes, us)
    capacity = floor_bytes(p, machine(0)).needed_bytes + spare
    tight = lower_bound(p, machine(capacity, rate)).us
    for easier in (machine(capacity + 25, rate), machine(capacity, rate * 1.5)):
        assert lower_bound(p, easier).us <= tight * (1 + 1e-5) + 0.01


def test_merged_slots_bound_less_than_fine_ones_and_still_more_than_compute() -> None:
    p = training([60] * 8, [2] * 8)
    found = survey(p, machine(260, 8))
    ids = tuple(o.id for o in p.ops)

    def lp(grid: Grid) -> float:
        return solve_lp(build(found, grid), ids, 10).ns or 0

    assert sum(o.duration_us for o in p.ops) * 1000 < lp(coarse(found, 4)) <= lp(fine(found)) + 1
    assert lp(fine(found)) <= lp(full(found)) + 1


def test_any_multipliers_prove_a_bound() -> None:
    p = training([60] * 4, [2] * 4)
    model = build(s := survey(p, machine(200, 8)), full(s))
    exact = (solve_lp(model, tuple(o.id for o in p.ops), 10).ns or 0) / model.unit_ns
    rng = random.Random(1)
    for _ in range(20):
        made_up = [rng.uniform(-1, 0.1) for _ in model.program.rhs]
        assert dual_bound(model.program, np.array(made_up)) <= exact + 1e-6


# ---- what else is promised -----------------------------------------------------------------


def test_a_solver_that_fails_leaves_the_compute_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no solver today")

    monkeypatch.setattr("offcompile.bounds.program.solve.solve", broken)
    p = steady(weights(100, 100), op("F0", 10, "w0"), op("F1", 10, "w1"))
    bound = lower_bound(p, machine(100))
    assert (bound.us, bound.method, bound.complete) == (20, "compute", False)


def test_without_time_it_says_that_it_is_not_complete() -> None:
    p = steady(weights(100, 100), op("F0", 10, "w0"), op("F1", 10, "w1"))
    bound = lower_bound(p, machine(100), seconds=0.0)
    assert (bound.us, bound.method, bound.complete) == (20, "compute", False)


def test_a_device_too_small_for_any_plan_is_reported_not_proven() -> None:
    p = steady(weights(100), op("F", 10, "w0"), op("X", 1))
    bound = lower_bound(p, machine(99))
    assert bound.infeasible and bound.us == 11


def test_deep_nets_take_merged_slots_and_keep_to_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that only the LPs advance, each by the same: the machine's speed plays no part."""
    now_s, lp_s, solved_at_s = 0.0, 0.3, list[float]()

    def timed(model: BoundModel, ids: tuple[str, ...], left_s: float) -> Answer:
        nonlocal now_s
        solved_at_s.append(now_s)
        now_s += lp_s
        return replace(solve_lp(model, ids, 300.0), seconds=lp_s)

    monkeypatch.setattr(bounds, "solve_lp", timed)
    monkeypatch.setattr(time, "thread_time", lambda: now_s)
    rng = random.Random(3)
    p = training([rng.randint(20, 90) for _ in range(300)], [rng.randint(1, 9) for _ in range(300)])
    bound = lower_bound(p, machine(6000, 5), seconds=1.0)
    assert bound.method == "traffic" and not bound.complete
    assert solved_at_s and max(solved_at_s) < 1.0
    assert bound.us > simple_lower_bound(p, machine(6000))
    assert {t for t, _ in bound.away_hints} <= set(p.tensor)


def test_where_time_is_too_short_a_coarser_program_may_come_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rng = random.Random(3)
    p = training([rng.randint(20, 90) for _ in range(60)], [rng.randint(1, 9) for _ in range(60)])
    slots = {count: columns_of(*_merged(p, count)) for count in (4, 16)}
    assert slots[16] > 2 * slots[4]
    # one of 16 slots is taken to need more than there is, one of 4 a third of it
    monkeypatch.setattr(bounds, "COLUMNS_OF_A_SECOND", slots[4] / (100 / 3) ** 0.5)
    solved: list[int] = []

    def counted(model: BoundModel, ids: tuple[str, ...], left_s: float) -> Answer:
        solved.append(model.program.n_columns)
        return replace(solve_lp(model, ids, 300.0), seconds=1e6)  # no time for another

    monkeypatch.setattr(bounds, "solve_lp", counted)
    first = lower_bound(p, machine(1200, 5), seconds=100.0)
    assert not solved and first.method == "compute"
    coarser = lower_bound(p, machine(1200, 5), seconds=100.0, first_slots=4)
    assert len(solved) == 1 and coarser.method == "traffic"


def _merged(p: Problem, count: int) -> tuple[Survey, Grid]:
    found = survey(p, machine(1200, 5))
    return merged_tensors(found, coarse(found, count)), coarse(found, count)


def test_hints_name_tensors_and_the_op_before_the_gap() -> None:
    p = training([60, 60, 60], [2, 2, 2])
    hints = lower_bound(p, machine(200, 8)).away_hints
    names = {None, *p.op}
    assert hints and all(
        t in p.tensor and o in names and 0 <= x <= 1 for (t, o), x in hints.items()
    )
    assert any(x > 0.5 for x in hints.values())


def test_the_floor_names_the_op_that_needs_most() -> None:
    tensors = [*weights(40, 30), Tensor("a", 8, "activation")]
    p = steady(
        tensors,
        op("F", 1, "w0", "a", direct={"w0": 5}, work=20),
        op("B", 1, "w1 a", "w1", work=9),
        op("U", 1, "w0 w1", "w0", work=99, phase="update", host_duration_us=3),
    )
    floor = floor_bytes(p, machine(100))
    assert (floor.op, floor.needed_bytes, floor.tensors) == ("B", 30 + 8 + 9, ("w1", "a"))
    no_host = floor_bytes(p, Machine((Tier("device", 100),)))
    assert (no_host.op, no_host.needed_bytes) == ("U", 40 + 30 + 99)


def test_nothing_is_printed_while_solving(capfd: pytest.CaptureFixture[str]) -> None:
    p = training([60, 60, 60], [2, 2, 2])
    assert lower_bound(p, machine(200, 8)).method in ("lp", "milp")
    assert capfd.readouterr().out == ""


def test_a_problem_without_ops_takes_no_time() -> None:
    assert lower_bound(Problem((), (), True), machine(1)).us == 0
    assert bounds.floor_bytes(Problem((), (), True), machine(1)).op is None
