"""Every sentence of the contract on time, copies, the start and ops, worked out by hand.

Each case runs on the simulator and on the naive executor (`tests/support/oracle.py`); the figures
in nanoseconds written here hold for both. Moves and the rest: `test_simulate_semantics_moves.py`.
"""

from __future__ import annotations

import pytest
from oracle_hand import D, M, O, T, machine, see

from offcompile.ir import Direct, Lane, Machine, Plan, Problem, Start, Tier, Update
from offcompile.simulate import simulate

# Time


def test_durations_are_rounded_to_nanoseconds_halves_up():
    seen = see([], [O("A", 1.0005), O("B", 1.0004), O("C", 0.0005)])
    assert [seen.at(x) for x in "ABC"] == [(0, 1001), (1001, 2001), (2001, 2002)]


def test_direct_durations_are_rounded_one_by_one():
    w = T("w", 1, home="host")
    # 1.0004 → 1000 and 2.0005 → 2001: it lasts 1000 + (2001 − 1000)
    seen = see([w], [O("F", 1.0004, "w", direct={"w": 2.0005})], directs=[Direct("F", "w")])
    assert seen.at("F") == (0, 2001)


def test_a_move_is_rounded_once():
    w = T("w", 1, home="host")
    # 0.0003 + 1/3 µs = 333.63… ns; rounded apart it would be 0 + 333
    seen = see([w], [], machine(h2d=3, latency=0.0003), moves=[M("m", "w", "host>device")])
    assert seen.at("m") == (0, 334)


def test_drops_of_an_instant_free_space_before_the_next_op_starts():
    x = T("x", 5, "input", "device")
    ops = [O("A", 1, "x"), O("B", 1, workspace_bytes=5)]
    seen = see([x], ops, machine(device=5), drops=[D("x@device", "A")])
    assert seen.at("B") == (1000, 2000)
    assert seen.peak["device"] == 5


def test_the_compute_lane_takes_space_before_the_copy_lanes():
    w = T("w", 5, home="host")
    ops = [O("A", 2, workspace_bytes=4), O("B", 1, "w")]
    seen = see([w], ops, machine(device=8), moves=[M("m", "w", "host>device", None, "B")])
    assert seen.at("A") == (0, 2000)
    assert seen.at("m") == (2000, 7000)


def test_a_zero_length_op_ends_at_its_own_instant_before_lanes_act():
    w = T("w", 5, home="host")
    ops = [O("A", 0), O("B", 2, workspace_bytes=4), O("C", 1, "w")]
    seen = see([w], ops, machine(device=8), moves=[M("m", "w", "host>device", "A", "C")])
    assert seen.at("A") == (0, 0)
    assert seen.at("B") == (0, 2000)
    assert seen.at("m") == (2000, 7000)


def test_the_compute_lane_takes_space_before_host_updates_and_these_before_lanes():
    s, x = T("s", 1, "weight", "host"), T("x", 4, "input", "disk")
    hosted = O("U", 1, "s", "s", phase="update", host_duration_us=2, workspace_bytes=4)
    out = T("y", 4, "output")
    direct = O("A", 3, "", "y", direct={"y": 3})
    moves = [M("m", "x", "disk>host")]
    plan = {"moves": moves, "directs": [Direct("A", "y")], "updates": [Update("s", "host")]}
    # host holds 1 of 9: A takes 4, U's workspace 4, and m waits until U gives back its 4
    seen = see([s, x, out], [hosted, direct], machine(host=9), **plan)
    assert (seen.at("A"), seen.at("U"), seen.at("m")) == ((0, 3000), (0, 2000), (2000, 6000))
    # A leaves 3 of 8 bytes: U can never run, for y stays
    assert not see([s, x, out], [hosted, direct], machine(host=8), **plan).timeline.valid


@pytest.mark.parametrize("order", [("h2d", "other"), ("other", "h2d")])
def test_lanes_act_in_listed_order(order):
    tensors = [T("v", 4, "input", "host"), T("w", 4, "input", "host")]
    moves = [M("h2d", "v", "host>device", None, "A"), M("other", "w", "host>device", None, "B")]
    moves[1] = M("other", "w", "host>device", None, "B", lane="other")
    if order[0] == "other":  # B must not wait for a move that A's end makes room for
        moves = [M("h2d", "v", "host>device", None, "B"), M("other", "w", "host>device", None, "A")]
        moves[1] = M("other", "w", "host>device", None, "A", lane="other")
    first = {"h2d": "v", "other": "w"}[order[0]]
    lanes = tuple(Lane(n, "host", "device", 1) for n in order)
    on = Machine((Tier("device", 4), Tier("host")), lanes)
    second = {"v": "w", "w": "v"}[first]
    ops = [O("A", 1, first), O("B", 1, second)]
    seen = see(tensors, ops, on, moves=moves, drops=[D(f"{first}@device", "A")])
    assert seen.at(order[0]) == (0, 4000)
    assert seen.at(order[1]) == (5000, 9000)


# Copies and start


def test_a_compressed_copy_takes_its_bytes_rounded_up_until_it_is_freed():
    a = T("a", 5, "activation")
    moves = [M("out", "a", "device>host", "F", codec="half")]
    moves.append(M("in", "a", "host>device", "out", "B", codec="half"))
    ops = [O("F", 1, "", "a"), O("B", 1, "a")]
    seen = see([a], ops, moves=moves, drops=[D("a@device", "F")])
    # 5 × ½ → 3 bytes each way, and the device holds all 5 again
    assert (seen.at("out"), seen.at("in")) == ((1000, 4000), (4000, 7000))
    assert seen.peak == {"device": 5, "host": 3, "disk": 0}


def test_the_first_step_starts_with_nothing_in_flight():
    w = T("w", 3)
    moves = [M("m", "w", "host>device", "F", "F", wraps=True)]
    seen = see(
        [w], [O("F", 1, "w")], start="w@host w@device", moves=moves, drops=[D("w@device", "F")]
    )
    # first F at once; the second waits for the first step's m: 1000 + 3000
    assert (seen.at("F"), seen.at("m"), seen.at("F", 1)) == ((0, 1000), (1000, 4000), (4000, 5000))
    # steps of 1000, then 3000 + 1000 for ever
    assert seen.makespan_ns == 4000
    assert seen.timeline.steps[:3] == ((0, 1000), (1000, 5000), (5000, 9000))


def test_a_start_copy_that_a_compressed_move_left_is_compressed():
    g = T("g", 5, "state")
    moves = [M("in", "g", "host>device", None, "U", codec="half")]
    moves.append(M("out", "g", "device>host", "U", codec="half"))
    seen = see(
        [g], [O("U", 1, "g", "g")], start="g@host", moves=moves, drops=[D("g@device", "out")]
    )
    assert seen.peak == {"device": 5, "host": 3, "disk": 0}
    assert seen.makespan_ns == 3000 + 1000 + 3000


def test_a_home_copy_is_never_compressed_when_the_problem_is_not_steady():
    g = T("g", 5, "state", "host")
    moves = [M("in", "g", "host>device", None, "U")]
    moves.append(M("out", "g", "device>host", "U", codec="half"))
    seen = see([g], [O("U", 1, "g", "g")], moves=moves)
    assert (seen.at("in"), seen.at("out")) == ((0, 5000), (6000, 9000))
    assert seen.peak["host"] == 5


def test_a_steady_step_must_end_as_it_began():
    w, ops = T("w", 3), [O("F", 1, "w")]
    moves = [M("m", "w", "host>device", None, "F")]
    assert see([w], ops, start="w@host", moves=moves).rules == {"steady"}  # the device copy stays
    assert see([w], ops, start="w@host", moves=moves, drops=[D("w@device", "F")]).timeline.valid
    gone = see([w], ops, start="w@host w@device", drops=[D("w@host", "F")])
    assert gone.rules == {"steady"}


def test_targets_of_wrapped_moves_may_be_left_out_of_start():
    w, v = T("w", 3), T("v", 1)
    moves = [M("m", "w", "device>host", "F", None, wraps=True)]
    ops, drops = [O("F", 5, "v w"), O("G", 1)], [D("w@host", "G")]
    assert see([w, v], ops, start="w@device v@device", moves=moves[:1]).rules  # next m never starts
    # dropped in the next step before its own m: start may name it or not
    left = {"moves": [M("m", "w", "device>host", "G", None, wraps=True)], "drops": drops}
    assert see([w, v], ops, start="w@device v@device", **left).timeline.valid
    assert see([w, v], ops, start="w@device w@host v@device", **left).timeline.valid


def test_start_is_every_tensor_on_its_home_when_not_steady():
    problem = Problem((T("w", 3, home="host"),), (O("F", 1),))
    for start in [(), (Start("w", "device"),), (Start("w", "host"), Start("w", "device"))]:
        timeline = simulate(problem, machine(), Plan(start))
        assert {v.rule for v in timeline.violations} == {"bad-value"}
    assert simulate(problem, machine(), Plan((Start("w", "host"),))).valid


def test_wraps_needs_a_steady_problem():
    move = M("m", "w", "host>device", None, None, wraps=True)
    assert see([T("w", 3, home="host")], [O("F", 1)], moves=[move]).rules == {"bad-value"}


@pytest.mark.parametrize("kind", ["weight", "state", "output", "gradient"])
def test_what_the_step_is_for_must_exist_at_the_end(kind):
    assert see([T("t", 3, kind)], [O("F", 1)]).rules == {"lost"}
    assert see([T("t", 3, kind)], [O("F", 1, "", "t")]).timeline.valid


def test_invalid_copies_vanish_at_the_steps_end():
    w = T("w", 3)
    # host's copy turns stale in U; nothing drops it, and yet the step ends as it began
    seen = see(
        [w], [O("U", 5, "w", "w")], start="w@device", moves=[M("m", "w", "device>host", None, "U")]
    )
    assert seen.timeline.valid
    assert seen.at("m", 1) == (8000, 11000)
    assert seen.peak["host"] == 3
    # and its space is there again for x, which every step sends through the host before w
    moves = [M("mx", "x", "device>host"), M("m", "w", "device>host", "mx", "U")]
    plan = {"start": "w@device x@device", "moves": moves, "drops": [D("x@host", "mx")]}
    seen = see([w, T("x", 3)], [O("U", 5, "w", "w")], machine(host=3), **plan)
    assert (seen.at("m"), seen.at("mx", 1)) == ((3000, 6000), (11000, 14000))


def test_a_drop_after_a_wrapped_move_counts_as_done_in_its_own_step():
    w = T("w", 3)
    moves = [M("in", "w", "host>device", None, "U"), M("out", "w", "device>host", "U", wraps=True)]
    drops = [D("w@device", "out")]
    # the second step's load waits until that drop has made way: 3 + 1, then 3 + 3 + 1
    seen = see([w], [O("U", 1, "w", "w"), O("V", 0)], start="w@host", moves=moves, drops=drops)
    assert seen.timeline.valid
    assert (seen.at("out"), seen.at("in", 1)) == ((4000, 7000), (7000, 10000))
    assert seen.makespan_ns == 7000


# Ops


def test_ops_run_one_at_a_time_in_listed_order():
    seen = see([], [O("B", 2, phase="update"), O("A", 3, phase="forward")])
    assert (seen.at("B"), seen.at("A")) == ((0, 2000), (2000, 5000))


def test_an_op_waits_for_moves_that_name_it_even_if_it_does_not_read_them():
    moves = [M("m", "w", "host>device", None, "F")]
    assert see([T("w", 3, home="host")], [O("F", 1)], moves=moves).at("F") == (3000, 4000)


def test_an_op_waits_for_what_it_reads_whatever_the_hints():
    moves = [M("m", "w", "host>device", None, "G")]
    ops = [O("F", 1, "w"), O("G", 1)]
    assert see([T("w", 3, home="host")], ops, moves=moves).at("F") == (3000, 4000)


def test_ready_before_never_makes_an_illegal_read_legal():
    w, moves = T("w", 3, home="host"), [M("m", "w", "host>device", None, "G")]
    ops = [O("F", 5), O("G", 1, "w")]
    assert see([w], ops, moves=moves).at("G") == (5000, 6000)
    assert see([w], ops, moves=moves, drops=[D("w@device", "m")]).rules & {"missing-copy"}


def test_a_read_without_a_copy():
    assert "missing-copy" in see([T("w", 3, home="host")], [O("F", 1, "w")]).rules


def test_a_read_of_a_stale_copy():
    w = T("w", 3, home="device")
    hosted = O("U", 1, "w", "w", phase="update", host_duration_us=1)
    moves = [M("m", "w", "device>host", None, "U")]
    plan = {"moves": moves, "updates": [Update("w", "host")]}
    assert "stale-read" in see([w], [hosted, O("F", 1, "w")], **plan).rules


def test_an_op_waits_for_moves_of_what_it_writes():
    moves = [M("m", "w", "device>host")]
    seen = see([T("w", 3, home="device")], [O("A", 1), O("F", 1, "", "w")], moves=moves)
    assert (seen.at("m"), seen.at("F")) == ((0, 3000), (3000, 4000))


def test_an_op_waits_until_its_outputs_and_workspace_fit():
    x, y = T("x", 3, "input", "device"), T("y", 4, "output")
    ops = [O("A", 1), O("F", 2, "", "y", workspace_bytes=2)]
    plan = {"moves": [M("m", "x", "device>host")], "drops": [D("x@device", "m")]}
    seen = see([x, y], ops, machine(device=8), **plan)
    assert seen.at("F") == (3000, 5000)  # 3 + 4 + 2 > 8 until x has gone
    assert seen.peak["device"] == 6
    assert see([x, y], ops, machine(device=9), **plan).at("F") == (1000, 3000)


def test_what_can_never_fit_names_the_bytes_that_are_missing():
    seen = see([T("x", 3, "input", "device")], [O("F", 1, workspace_bytes=7)], machine(device=8))
    assert "no-space" in seen.rules
    assert any("2 bytes" in v.detail for v in seen.timeline.violations)  # 3 + 7 − 8


def test_an_output_with_a_device_copy_is_overwritten_in_place():
    seen = see([T("w", 3, home="device")], [O("F", 1, "", "w")], machine(device=3))
    assert seen.peak["device"] == 3


def test_a_direct_output_is_written_on_the_host_and_needs_no_device_space():
    g = T("g", 7, "gradient")
    seen = see(
        [g], [O("B", 1, "", "g", direct={"g": 3})], machine(device=0), directs=[Direct("B", "g")]
    )
    assert seen.at("B") == (0, 3000)
    assert seen.peak == {"device": 0, "host": 7, "disk": 0}


def test_workspace_is_given_back_at_the_end():
    ops = [O("A", 1, workspace_bytes=5), O("B", 1, workspace_bytes=5)]
    assert see([], ops, machine(device=5)).peak["device"] == 5


@pytest.mark.parametrize(
    ("direct", "lasts"),
    [({"w": 6}, 6000), ({"w": 6, "a": 3}, 5000), ({"w": 1, "a": 1}, 0)],  # 4+2−1; 4−3−3 < 0
)
def test_each_direct_operand_adds_its_difference(direct, lasts):
    tensors = [T("w", 1, home="host"), T("a", 1, "input", "host")]
    moves = [] if "a" in direct else [M("m", "a", "host>device", None, "F")]
    begins = 0 if "a" in direct else 1000
    op = O("F", 4, "w a", direct={"w": 6, "a": 3, **direct})
    seen = see(tensors, [op], moves=moves, directs=[Direct("F", t) for t in direct])
    assert seen.at("F") == (begins, begins + lasts)


def test_an_operand_without_an_entry_cannot_be_accessed_in_place():
    w = T("w", 1, home="host")
    assert see([w], [O("F", 1, "w")], directs=[Direct("F", "w")]).rules == {"direct"}


def test_a_compressed_copy_cannot_be_accessed_in_place():
    a, ops = T("a", 4, "activation"), [O("F", 1, "", "a"), O("B", 1, "a", direct={"a": 2})]
    moves = [M("m", "a", "device>host", "F", codec="half")]
    seen = see([a], ops, moves=moves, directs=[Direct("B", "a")])
    assert seen.rules & {"codec", "direct"}
    plain = [M("m", "a", "device>host", "F")]
    assert see([a], ops, moves=plain, directs=[Direct("B", "a")]).at("B") == (5000, 7000)
