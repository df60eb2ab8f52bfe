"""The auditor: hand-made records that are right, and every way of spoiling them."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from offcompile.ir import (
    Codec,
    Direct,
    Drop,
    Freed,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Recompute,
    Span,
    Start,
    Tensor,
    Tier,
    Timeline,
    Update,
    Violation,
)
from offcompile.ir.verify import check_structure, check_timeline, verify
from offcompile.simulate import simulate
from offcompile.testing import plans, problems_with_machines

MACHINE = Machine(
    (Tier("device", 7), Tier("host")),
    (Lane("h2d", "host", "device", 4), Lane("d2h", "device", "host", 2, 0.5)),
    (Codec("fp16", False, 1),),
)
# one weight that comes in, is read, is read and written, and goes back
PROBLEM = Problem(
    (Tensor("w", 4, "weight", "host", {"fp16": 0.5}), Tensor("a", 2, "activation")),
    (
        Op("F", "forward", 2, ("w",), ("a",), direct={"w": 3}),
        Op("B", "backward", 3, ("w", "a"), ("w",), workspace_bytes=1),
    ),
    steady=True,
)
IN = Move("in", "w", "host", "device", "h2d", None, "F")
OUT = Move("out", "w", "device", "host", "d2h", "B")
DROP = Drop("w", "device", "out")
PLAN = Plan((Start("w", "host"),), (IN, OUT), (DROP,))
LANES = {"in": "h2d", "out": "d2h"}
STEP = {"in": (0, 1000), "F": (1000, 3000), "B": (3000, 6000), "out": (6000, 8500)}
FREED = (Freed("a", "device", 6000, "death"), Freed("w", "device", 8500, "drop"))


def record(step=STEP, freed=FREED, peak=None, lanes=LANES, length=None, steps=2, **fields):
    """A timeline of equal steps, from the spans and frees of the first."""
    length = max(end for _, end in step.values()) if length is None else length
    spans, gone = [], []
    for i in range(steps):
        for name, (start, end) in step.items():
            at = (start + i * length, end + i * length)
            spans.append(Span(name, lanes.get(name, "compute"), i, *at))
        gone += [replace(f, time_ns=f.time_ns + i * length) for f in freed]
    bounds = tuple((i * length, (i + 1) * length) for i in range(steps))
    peak = {"device": 7, "host": 4} if peak is None else peak
    return Timeline(length / 1000, peak, tuple(spans), tuple(gone), (), bounds, **fields)


GOOD = record()


def audit(timeline, plan=PLAN, problem=PROBLEM, machine=MACHINE):
    assert check_structure(problem, machine, plan) == ()
    return check_timeline(problem, machine, plan, timeline)


def rules(timeline, plan=PLAN, problem=PROBLEM, machine=MACHINE):
    return {v.rule for v in audit(timeline, plan, problem, machine)}


def details(*args, **named):
    return "\n".join(v.detail for v in audit(*args, **named))


def test_the_good_record_passes():
    assert audit(GOOD) == ()
    assert verify(PROBLEM, MACHINE, PLAN, GOOD) == ()


def test_verify_puts_structure_first_and_believes_a_record_that_accuses_itself():
    wrong = replace(PLAN, moves=(replace(IN, lane="d2h"), OUT))
    assert {v.rule for v in verify(PROBLEM, MACHINE, wrong, GOOD)} == {"wrong-lane"}
    stopped = Timeline(0.0, {}, violations=(Violation("deadlock", "F", "waits for in"),))
    assert verify(PROBLEM, MACHINE, PLAN, stopped) == stopped.violations


# the record itself


def span_changed(name, **fields):
    spans = [replace(s, **fields) if (s.id, s.step) == (name, 0) else s for s in GOOD.spans]
    return replace(GOOD, spans=tuple(spans))


@pytest.mark.parametrize(
    ("timeline", "rule"),
    [
        (replace(GOOD, spans=GOOD.spans[1:]), "deadlock"),
        (replace(GOOD, spans=GOOD.spans + GOOD.spans[-1:]), "duplicate-id"),
        (span_changed("F", id="Z"), "unknown-id"),
        (span_changed("F", step=5), "unknown-id"),
        (span_changed("in", lane="d2h"), "wrong-lane"),
        (span_changed("F", end_ns=2999), "bad-value"),  # too short
        (span_changed("out", start_ns=6001, end_ns=8501), "late-move"),  # beyond its step
        (span_changed("B", start_ns=2999, end_ns=5999), "bad-value"),  # F still runs
        (replace(GOOD, makespan_us=8.4), "bad-value"),
        (replace(GOOD, peak_bytes={"device": 6, "host": 4}), "bad-value"),
        (replace(GOOD, steps=()), "bad-value"),
        (replace(GOOD, steps=((0, 8499), (8500, 17000))), "bad-value"),
        (record(steps=1), "steady"),
        (replace(GOOD, freed=GOOD.freed[1:]), "bad-value"),  # a is dead and stays
        (replace(GOOD, freed=(*GOOD.freed, Freed("w", "device", 1, "drop"))), "read-after-drop"),
        (replace(GOOD, freed=(*GOOD.freed, Freed("a", "host", 1, "drop"))), "bad-value"),
        (replace(GOOD, freed=(*GOOD.freed, Freed("a", "host", 17001, "drop"))), "bad-value"),
    ],
)
def test_a_spoilt_record(timeline, rule):
    assert rule in rules(timeline)


def test_durations_are_exact():
    assert "lasted 2001 ns; the contract gives 2000 ns" in details(span_changed("F", end_ns=3001))


def test_nothing_idles_on_its_own_account():
    lazy = {n: (s + (n != "in") * 500, e + (n != "in") * 500) for n, (s, e) in STEP.items()}
    late = tuple(replace(f, time_ns=f.time_ns + 500) for f in FREED)
    found = audit(record(lazy, late))
    assert found and found[0].where == "op F, step 0"
    assert "nothing keeps it from starting at 1000 ns" in found[0].detail


def test_capacity():
    assert rules(GOOD, machine=MACHINE.with_capacity("device", 6)) == {"no-space"}


# reads, writes and triggers

EAGER = {"in": (0, 1000), "F": (0, 2000), "B": (2000, 5000), "out": (5000, 7500)}
EAGER_FREED = (Freed("a", "device", 5000, "death"), Freed("w", "device", 7500, "drop"))


def test_an_op_waits_for_the_move_and_for_the_copy():
    assert rules(record(EAGER, EAGER_FREED)) >= {"late-move", "stale-read"}
    unasked = replace(PLAN, moves=(replace(IN, ready_before=None), OUT))
    found = rules(record(EAGER, EAGER_FREED), unasked)
    assert "late-move" not in found and "stale-read" in found
    assert audit(GOOD, unasked) == ()  # the hint is only a hint


def test_a_move_waits_for_its_trigger_and_its_source():
    early = {**STEP, "out": (5000, 7500)}
    freed = (FREED[0], Freed("w", "device", 7500, "drop"))
    shown = details(record(early, freed))
    assert "B, its start_after, has not ended" in shown
    assert "w on device is stale or not complete" in shown


def test_no_write_while_a_move_reads():
    # w is saved from the device while B begins to write it
    save = Move("save", "w", "device", "host", "d2h")
    plan = replace(PLAN, start=(Start("w", "device"),), moves=(save,), drops=())
    step = {"F": (0, 2000), "save": (0, 2500), "B": (2000, 5000)}
    timeline = record(step, (Freed("a", "device", 5000, "death"),), lanes={"save": "d2h"})
    assert "stale-read" in rules(timeline, plan)
    assert "move save of w, which it writes, runs" in details(timeline, plan)


def test_a_target_with_a_valid_copy_takes_no_move():
    back = Move("back", "w", "device", "host", "d2h", "F")
    plan = replace(PLAN, moves=(IN, back, OUT))
    step = {**STEP, "back": (3000, 5500), "B": (5500, 8500), "out": (8500, 11000)}
    freed = (Freed("a", "device", 8500, "death"), Freed("w", "device", 11000, "drop"))
    shown = details(record(step, freed, lanes={**LANES, "back": "d2h"}), plan)
    assert "host holds a valid copy of w already" in shown


# frees


@pytest.mark.parametrize(
    ("drop", "freed", "rule"),
    [
        (DROP, Freed("w", "device", 7000, "drop"), "read-after-drop"),  # while out reads it
        (Drop("w", "device", "B"), Freed("w", "device", 6000, "drop"), "missing-write-back"),
        (DROP, Freed("w", "device", 8500, "death"), "bad-value"),  # weights do not die
    ],
)
def test_a_weight_that_goes_too_early(drop, freed, rule):
    assert rule in rules(record(freed=(FREED[0], freed)), replace(PLAN, drops=(drop,)))


def test_a_drop_waits_for_the_copy_that_replaces_it():
    asked_early = replace(PLAN, drops=(Drop("w", "device", "B"),))
    assert audit(GOOD, asked_early) == ()


def test_an_activation_that_dies_before_its_last_reader():
    early = Freed("a", "device", 3000, "death")
    assert "read-after-drop" in rules(record(freed=(early, FREED[1])))


def test_an_op_may_not_read_a_copy_whose_drop_is_pending():
    pending = replace(PLAN, drops=(Drop("w", "device", "F"),))
    # nothing else holds w while B rewrites it, and B reads it: an error, not a wait
    without_host = replace(pending, start=(Start("w", "device"),), moves=(), drops=pending.drops)
    step = {"F": (0, 2000), "B": (2000, 5000)}
    timeline = record(step, (Freed("a", "device", 5000, "death"),), {"device": 7, "host": 0})
    assert audit(timeline, replace(without_host, drops=())) == ()
    assert "read-after-drop" in rules(timeline, without_host)


def test_a_read_of_what_was_dropped():
    plan = replace(PLAN, drops=(Drop("w", "device", "F"), DROP))
    freed = (Freed("w", "device", 3000, "drop"), *FREED)
    assert "read-after-drop" in rules(record(freed=freed), plan)


def test_inputs_go_only_when_nothing_reads_them_again():
    tensors = (Tensor("x", 2, "input", "device"),)
    ops = (Op("P", "forward", 1, ("x",)), Op("Q", "forward", 1, ("x",)))
    problem = Problem(tensors, ops)
    plan = Plan((Start("x", "device"),), (), (Drop("x", "device", "P"),))
    step = {"P": (0, 1000), "Q": (1000, 2000)}
    gone = record(step, (Freed("x", "device", 1000, "drop"),), {"device": 2}, steps=1)
    assert {"lost", "read-after-drop"} <= rules(gone, plan, problem)
    after_q = replace(plan, drops=(Drop("x", "device", "Q"),))
    kept = record(step, (Freed("x", "device", 2000, "drop"),), {"device": 2}, steps=1)
    assert audit(kept, after_q, problem) == ()
    # in a steady problem the next step reads it again
    again = record(step, (Freed("x", "device", 2000, "drop"),), {"device": 2})
    assert "lost" in rules(again, after_q, replace(problem, steady=True))


# ends of steps


def test_steady_ends_as_it_began():
    kept = record(freed=FREED[:1])
    assert rules(kept, replace(PLAN, drops=())) == {"bad-value", "steady"}
    both = replace(PLAN, start=(Start("w", "host"), Start("w", "device")))
    assert "steady" in rules(GOOD, both)


def test_a_claim_to_have_settled_is_tried():
    # two steps that differ: the second waits for a wrapped move of the first
    wrapped = Move("late", "a", "device", "host", "d2h", "F", None, True)
    problem = Problem(
        (Tensor("a", 4, "input", "device"),),
        (Op("F", "forward", 1, ("a",)),),
        steady=True,
    )
    plan = Plan((Start("a", "device"),), (wrapped,), (Drop("a", "host", "late"),))
    spans = (
        Span("F", "compute", 0, 0, 1000),
        Span("late", "d2h", 0, 1000, 3500),
        Span("F", "compute", 1, 1000, 2000),
        Span("late", "d2h", 1, 3500, 6000),
    )
    freed = (Freed("a", "host", 3500, "drop"),)
    steps = ((0, 1000), (1000, 3500))
    claims = Timeline(2.5, {"device": 4, "host": 4}, spans, freed, (), steps, settled=True)
    assert rules(claims, plan, problem) == {"steady"}
    assert audit(replace(claims, settled=False), plan, problem) == ()
    third = (
        *spans[:3],
        Span("F", "compute", 2, 3500, 4500),
        Span("late", "d2h", 1, 3500, 6000),
    )
    freed = (*freed, Freed("a", "host", 6000, "drop"))
    steps = (*steps, (3500, 6000))
    settled = replace(claims, spans=third, freed=freed, steps=steps)
    assert audit(settled, plan, problem) == ()


def test_nothing_that_matters_is_lost():
    problem = Problem((Tensor("y", 1, "output"),), (Op("F", "forward", 1),))
    timeline = record({"F": (0, 1000)}, (), {}, steps=1)
    assert rules(timeline, Plan(), problem) == {"lost"}
    writes = replace(problem, ops=(Op("F", "forward", 1, (), ("y",)),))
    assert audit(replace(timeline, peak_bytes={"device": 1}), Plan(), writes) == ()


def test_a_drop_that_can_never_be_done():
    plan = Plan((Start("w", "device"),), (), (Drop("w", "device", "B"),))
    step = {"F": (0, 2000), "B": (2000, 5000)}
    timeline = record(step, (Freed("a", "device", 5000, "death"),), {"device": 7, "host": 0})
    assert "missing-write-back" in rules(timeline, plan)


def test_stale_copies_vanish_at_the_end_of_the_step():
    plan = replace(PLAN, start=(Start("w", "device"),), moves=(replace(OUT, start_after=None),))
    plan = replace(plan, drops=())
    step = {"F": (0, 2000), "out": (0, 2500), "B": (2500, 5500)}
    freed = (Freed("a", "device", 5500, "death"), Freed("w", "host", 5500, "stale"))
    assert audit(record(step, freed), plan) == ()
    assert "bad-value" in rules(record(step, freed[:1]), plan)


# access in place, codecs, host updates, recomputation, wrapped moves


def test_access_in_place():
    plan = replace(PLAN, directs=(Direct("F", "w"),), moves=(replace(IN, ready_before="B"), OUT))
    step = {"in": (0, 1000), "F": (0, 3000), "B": (3000, 6000), "out": (6000, 8500)}
    assert audit(record(step), plan) == ()
    assert "bad-value" in rules(record(STEP), plan)  # F lasts 3 µs and need not wait


def test_compressed_copies_take_fewer_bytes_and_the_codec_its_time():
    # 4 bytes become 2: 1 µs on the link, but the codec takes 4 µs each way
    plan = replace(PLAN, moves=(replace(IN, codec="fp16"), replace(OUT, codec="fp16")))
    step = {"in": (0, 4000), "F": (4000, 6000), "B": (6000, 9000), "out": (9000, 13500)}
    freed = (Freed("a", "device", 9000, "death"), Freed("w", "device", 13500, "drop"))
    assert audit(record(step, freed, {"device": 7, "host": 2}), plan) == ()
    assert rules(record(step, freed, {"device": 7, "host": 4}), plan) == {"bad-value"}
    direct = replace(plan, directs=(Direct("F", "w"),))
    step = {"in": (0, 4000), "F": (0, 3000), "B": (4000, 7000), "out": (7000, 11500)}
    freed = (Freed("a", "device", 7000, "death"), Freed("w", "device", 11500, "drop"))
    assert "codec" in rules(record(step, freed, {"device": 7, "host": 2}), direct)


HOST_UPDATE = Problem(
    (Tensor("w", 4, "weight", "host"), Tensor("g", 2, "gradient")),
    (
        Op("B", "backward", 2, ("w",), ("g",), direct={"g": 3}),
        Op("U", "update", 1, ("w", "g"), ("w",), 5, host_duration_us=4),
        Op("C", "forward", 1),
    ),
    steady=True,
)
HOSTED = Plan(
    (Start("w", "host"),),
    (Move("in", "w", "host", "device", "h2d", None, "B"),),
    (Drop("w", "device", "B"), Drop("g", "host", "U")),
    (Direct("B", "g"),),
    (),
    (Update("w", "host"),),
)


def hosted(u=(4000, 8000), b=(1000, 4000)):
    step = {"in": (0, 1000), "B": b, "U": u, "C": (4000, 5000)}
    freed = (Freed("w", "device", 4000, "drop"), Freed("g", "host", u[1], "drop"))
    peak = {"device": 4, "host": 11}
    return record(step, freed, peak, {"in": "h2d", "U": "host_compute"})


def test_host_updates_run_beside_the_ops():
    assert audit(hosted(), HOSTED, HOST_UPDATE) == ()
    assert rules(hosted(), HOSTED, HOST_UPDATE, MACHINE.with_capacity("host", 10)) == {"no-space"}


def test_host_updates_keep_the_order_of_what_they_share():
    early = hosted(u=(1000, 5000))
    assert "stale-read" in rules(early, HOSTED, HOST_UPDATE)
    assert "B comes first on" in details(early, HOSTED, HOST_UPDATE)


def test_an_activation_goes_between_its_reader_and_its_recomputation():
    problem = Problem(
        (Tensor("a", 2, "activation"), Tensor("b", 3, "activation")),
        (
            Op("F", "forward", 1, (), ("a",), recompute=True),
            Op("G", "forward", 1, ("a",), ("b",)),
            Op("B", "backward", 1, ("a", "b")),
        ),
    )
    plan = Plan(recomputes=(Recompute("F", "B"),))
    step = {"F": (0, 1000), "G": (1000, 2000), "F@B": (2000, 3000), "B": (3000, 4000)}
    ends = (Freed("a", "device", 4000, "death"), Freed("b", "device", 4000, "death"))
    between = Freed("a", "device", 2000, "death")
    good = record(step, (between, *ends), {"device": 5}, steps=1)
    assert audit(good, plan, problem) == ()
    assert "bad-value" in rules(replace(good, freed=ends), plan, problem)
    swapped = {**step, "F@B": (3000, 4000), "B": (2000, 3000)}
    wrong = record(swapped, (between, *ends), {"device": 5}, steps=1)
    assert "bad-value" in rules(wrong, plan, problem)


WRAPPED = replace(PLAN, moves=(replace(IN, start_after="out", wraps=True), OUT))


def wrapping(start, steps=3):
    """The weight goes out, and comes back for the next step while that one begins."""
    first = {"F": (0, 2000), "B": (2000, 5000), "out": (5000, 7500)}
    spans, begins = [], [0, 7500, 16000][:steps]
    for i, begin in enumerate(begins):
        shift = begin + (1000 if i else 0)
        for name, (a, b) in first.items():
            spans.append(Span(name, LANES.get(name, "compute"), i, a + shift, b + shift))
        if i + 1 < len(begins):
            spans.append(Span("in", "h2d", i, begins[i + 1], begins[i + 1] + 1000))
    ends = (*begins[1:], begins[-1] + 8500)
    freed = [Freed("a", "device", e - 2500, "death") for e in ends]
    freed += [Freed("w", "device", e, "drop") for e in ends]
    bounds = tuple(zip(begins, ends, strict=True))
    timeline = Timeline(8.5, {"device": 7, "host": 4}, tuple(spans), tuple(freed), (), bounds)
    return timeline, replace(WRAPPED, start=start)


def test_a_wrapped_move_belongs_to_the_settled_state():
    both = (Start("w", "host"), Start("w", "device"))
    timeline, plan = wrapping(both)
    assert audit(timeline, plan) == ()
    # its target may be left out of start, but then the first step has nothing to read
    timeline, plan = wrapping(both[:1])
    assert rules(timeline, plan) == {"missing-copy"}
    # and nothing else may
    timeline, plan = wrapping(both[1:])
    assert "steady" in rules(timeline, plan)


# whatever the simulator records, and whatever is done to it

FEW = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@FEW
@given(st.data(), st.booleans())
def test_what_the_simulator_records_passes_the_audit(data, sensible):
    problem, machine = data.draw(problems_with_machines())
    plan = data.draw(plans(problem, machine, sensible=sensible))
    timeline = simulate(problem, machine, plan)
    found = verify(problem, machine, plan, timeline)
    assert bool(found) == bool(timeline.violations), found


@FEW
@given(st.data())
def test_a_record_has_no_freedom(data):
    """The contract fixes every instant: any one figure changed is found out."""
    problem, machine = data.draw(problems_with_machines())
    timeline = simulate(problem, machine, plan := data.draw(plans(problem, machine, sensible=True)))
    assume(timeline.valid and timeline.spans)
    spans, freed = list(timeline.spans), list(timeline.freed)
    last = timeline.steps[-1][1]
    what = data.draw(st.sampled_from(["shift", "lose", "keep", "free", "peak"]))
    if what in ("shift", "lose"):
        i = data.draw(st.integers(0, len(spans) - 1))
        span = spans.pop(i)
        assume(span.end_ns <= last)
        if what == "shift":
            by = data.draw(st.sampled_from([-1000, -1, 1, 1000]))
            spans.append(replace(span, start_ns=span.start_ns + by, end_ns=span.end_ns + by))
        else:
            assume(span.step + 1 < len(timeline.steps) or span.lane == "compute")
    elif what == "keep":
        assume([f for f in freed if f.time_ns < last])
        gone = data.draw(st.sampled_from([f for f in freed if f.time_ns < last]))
        freed.remove(gone)
    elif what == "free":
        tensor = data.draw(st.sampled_from(problem.tensors)).id
        when = data.draw(st.sampled_from(sorted({s.start_ns for s in spans})))
        freed.append(Freed(tensor, "device", when, "drop"))
    tier = data.draw(st.sampled_from(machine.tiers)).name
    peak = {**timeline.peak_bytes}
    peak[tier] = peak.get(tier, 0) + (what == "peak")
    spoilt = replace(timeline, spans=tuple(spans), freed=tuple(freed), peak_bytes=peak)
    assert check_timeline(problem, machine, plan, timeline) == ()
    assert check_timeline(problem, machine, plan, spoilt) != ()
