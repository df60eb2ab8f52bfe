"""Every sentence of the contract on writes, moves, drops and what follows, worked out by hand.

Each case runs on the simulator and on the naive executor (`tests/support/oracle.py`); the figures
in nanoseconds written here hold for both. Time, copies and ops: `test_simulate_semantics.py`.
"""

from __future__ import annotations

import pytest
from oracle_hand import D, M, O, T, machine, see

from offcompile.ir import Direct, Lane, Machine, Recompute, Tier, Update

# Writes


def test_a_write_invalidates_every_copy_at_its_start_and_is_valid_from_its_end():
    w = T("w", 3, home="device")
    # at 1000, when A's end triggers it, U is already writing: m takes what U has written
    moves = [M("m", "w", "device>host", "A")]
    seen = see([w], [O("A", 1), O("U", 5, "w", "w")], moves=moves)
    assert seen.at("m") == (6000, 9000)


def test_invalid_copies_keep_their_space_until_dropped():
    w, x = T("w", 4, home="device"), T("x", 1, "input", "disk")
    ops = [O("A", 5), O("U", 2, "w", "w"), O("C", 1)]
    moves = [M("m", "w", "device>host"), M("late", "x", "disk>host", "U")]
    # the stale 4 bytes on the host leave no room for x there
    assert "no-space" in see([w, x], ops, machine(host=4), moves=moves).rules
    seen = see([w, x], ops, machine(host=4), moves=moves, drops=[D("w@host", "C")])
    assert seen.at("late") == (8000, 9000)


def test_an_invalid_copy_in_the_target_is_reused():
    w = T("w", 4, home="device")
    moves = [M("m", "w", "device>host", None, "U"), M("again", "w", "device>host", "U")]
    seen = see([w], [O("U", 2, "w", "w")], machine(host=4), moves=moves)
    assert seen.at("again") == (6000, 10000)
    assert seen.peak["host"] == 4


def test_a_weight_is_dropped_freely_after_forward_and_written_back_after_backward():
    w = T("w", 3)
    ops = [O("F", 1, "w"), O("L", 2), O("B", 1, "w", "w")]
    moves = [M("in", "w", "host>device", None, "F"), M("back", "w", "host>device", "F", "B")]
    drops = [D("w@device", "F"), D("w@device", "B")]
    unwritten = see([w], ops, start="w@host", moves=moves, drops=drops)
    assert unwritten.rules == {"missing-write-back"}
    moves.append(M("out", "w", "device>host", "B"))
    seen = see([w], ops, start="w@host", moves=moves, drops=drops)
    # in 0–3, F 3–4, back 4–7 beside L 4–6, B 7–8, out 8–11: one move out, though it left twice
    assert (seen.at("back"), seen.at("B"), seen.makespan_ns) == ((4000, 7000), (7000, 8000), 11000)
    assert seen.peak["device"] == 3


# Moves


def test_a_lane_carries_one_move_at_a_time_in_listed_order():
    v, w = T("v", 2, home="host"), T("w", 3, home="host")
    moves = [M("first", "v", "host>device", "A"), M("second", "w", "host>device")]
    seen = see([v, w], [O("A", 4)], moves=moves)  # second may not overtake
    assert (seen.at("first"), seen.at("second")) == ((4000, 6000), (6000, 9000))


def test_start_after_names_an_op_or_a_move_or_the_start_of_the_step():
    v, w = T("v", 2, home="host"), T("w", 3, home="device")
    moves = [M("a", "v", "host>disk"), M("b", "w", "device>host", "a")]
    seen = see([v, w], [O("A", 1)], moves=[*moves, M("c", "v", "host>device", "A")])
    assert (seen.at("a"), seen.at("b"), seen.at("c")) == ((0, 2000), (2000, 5000), (1000, 3000))


def test_a_move_waits_for_a_complete_source_copy():
    w = T("w", 3, home="disk")
    moves = [M("up", "w", "disk>host"), M("in", "w", "host>device", None, "F")]
    seen = see([w], [O("F", 1, "w")], moves=moves)
    assert (seen.at("up"), seen.at("in"), seen.at("F")) == ((0, 3000), (3000, 6000), (6000, 7000))


def test_a_move_waits_while_its_target_holds_a_valid_copy():
    w, ops = T("w", 3, home="host"), [O("A", 1, "w"), O("B", 8), O("C", 1)]
    moves = [M("one", "w", "host>device", None, "A"), M("two", "w", "host>device", None, "C")]
    seen = see([w], ops, moves=moves, drops=[D("w@device", "A")])
    assert seen.at("two") == (4000, 7000)
    assert not see([w], ops, moves=moves).timeline.valid


def test_a_move_waits_while_another_fills_its_target():
    w = T("w", 3, home="host")
    moves = [M("one", "w", "host>device"), M("two", "w", "host>device", lane="spare")]
    lanes = (Lane("h2d", "host", "device", 1), Lane("spare", "host", "device", 1))
    on = Machine((Tier("device"), Tier("host")), lanes)
    seen = see([w], [O("A", 1)], on, moves=moves, drops=[D("w@device", "one")])
    assert (seen.at("one"), seen.at("two")) == ((0, 3000), (3000, 6000))


def test_target_space_is_held_from_the_start_of_a_move():
    w = T("w", 3, home="host")
    moves = [M("m", "w", "host>device", "A")]
    seen = see([w], [O("A", 1), O("B", 2, workspace_bytes=6)], machine(device=8), moves=moves)
    assert seen.at("m") == (3000, 6000)  # B was first to the space at 1000
    ops = [O("A", 2), O("B", 2, workspace_bytes=6)]
    seen = see([w], ops, machine(device=8), moves=[M("m", "w", "host>device")])
    assert "no-space" in seen.rules  # m holds 3 bytes from 0, and w stays


@pytest.mark.parametrize(
    ("rates", "ends"),
    [
        ({}, 2000),  # 2 bytes over the link
        ({"half": 0.5}, 8000),  # 4 raw bytes through the codec
        ({"half": 0.5, "latency": 1}, 9000),  # latency comes on top
        ({"half": 2, "d2h": 0.5}, 4000),  # 2 / 0.5 against 4 / 2
    ],
)
def test_a_coded_move_lasts_the_slower_of_link_and_codec(rates, ends):
    a, moves = T("a", 4, "output"), [M("m", "a", "device>host", "F", codec="half")]
    seen = see([a], [O("F", 0, "", "a")], machine(**rates), moves=moves)
    assert seen.at("m") == (0, ends)


def test_a_compressed_copy_moves_on_with_its_codec_and_is_decompressed_into_the_device():
    a = T("a", 5, "output")
    path = ["device>host", "host>disk", "disk>host", "host>device"]
    codecs = ["half"] * 4
    ops = [O("F", 1, "", "a"), O("L", 1, "a")]

    def go(codecs):
        names = ["m0", "m1", "m2", "m3"]
        after = ["F", "m0", "m1", "m2"]
        moves = [
            M(n, "a", p, t, codec=c) for n, p, t, c in zip(names, path, after, codecs, strict=True)
        ]
        drops = [D("a@device", "m0"), D("a@host", "m1"), D("a@disk", "m2")]
        return see([a], ops, moves=moves, drops=drops)

    seen = go(codecs)
    assert seen.at("m3") == (10000, 13000)  # 3 bytes on each leg from 1000 on
    assert seen.peak == {"device": 5, "host": 3, "disk": 3}
    assert "codec" in go(["half", None, None, None]).rules
    assert "codec" in go(["half", "half", "half", None]).rules
    assert "codec" in go([None, "half", "half", "half"]).rules  # only leaving the device compresses


def test_a_wrapped_move_may_start_in_the_next_step_and_is_awaited_there():
    w = T("w", 3)
    ops = [O("F", 1, "w"), O("B", 5)]
    moves = [M("in", "w", "host>device", "B", "F", wraps=True)]
    seen = see([w], ops, start="w@host w@device", moves=moves, drops=[D("w@device", "F")])
    # F 0–1, B 1–6; then in 6–9 in the next step, which waits: 9–10, 10–15
    assert (seen.at("in"), seen.at("F", 1)) == ((6000, 9000), (9000, 10000))
    assert seen.makespan_ns == 9000


def test_moves_without_ready_before_hold_the_step_or_the_next_one_if_they_wrap():
    w, op = T("w", 5), O("F", 1)
    plan = {"moves": [M("m", "w", "host>disk")], "drops": [D("w@disk", "m")]}
    assert see([w], [op], start="w@host", **plan).makespan_ns == 5000
    plan["moves"] = [M("m", "w", "host>disk", wraps=True)]
    seen = see([w], [op], start="w@host", **plan)
    assert seen.timeline.steps[:3] == ((0, 1000), (1000, 5000), (5000, 10000))
    assert seen.makespan_ns == 5000


def test_a_move_that_can_only_follow_its_op_is_late():
    moves = [M("m", "w", "host>device", "F", "F")]
    assert see([T("w", 1, home="host")], [O("F", 1)], moves=moves).rules & {"late-move", "deadlock"}


def test_a_move_over_a_lane_of_other_tiers():
    moves = [M("m", "w", "host>device", lane="d2h")]
    assert see([T("w", 1, home="host")], [O("F", 1)], moves=moves).rules == {"wrong-lane"}


# Drops


def test_a_drop_waits_for_another_complete_copy():
    w, x = T("w", 3, home="device"), T("x", 1, "input", "device")
    plan = {"moves": [M("m", "w", "device>host", "A")], "drops": [D("w@device", "A")]}
    ops = [O("A", 1, "w"), O("B", 1, workspace_bytes=3)]
    seen = see([w, x], ops, machine(device=4), **plan)
    assert seen.at("B") == (4000, 5000)  # m is there at 4000


def test_a_drop_waits_while_the_copy_is_in_use():
    w, x = T("w", 3, home="host"), T("x", 3, "input", "host")
    moves = [M("m", "w", "host>device", None, "A"), M("n", "x", "host>device")]
    drops = [D("w@device", "t")]  # t ends at 4000, while A reads until 8000
    moves.append(M("t", "w", "host>disk", None, None))
    on = machine(device=3, write=0.75)
    seen = see([w, x], [O("A", 5, "w")], on, moves=moves, drops=drops)
    assert (seen.at("t"), seen.at("A")) == ((0, 4000), (3000, 8000))
    assert seen.at("n") == (8000, 11000)


def test_a_value_that_nobody_reads_before_its_next_write_needs_no_other_copy():
    x = T("x", 3, "input", "device")
    ops = [O("A", 1, "x"), O("B", 1, workspace_bytes=3)]
    drops = [D("x@device", "A")]
    assert see([x], ops, machine(device=3), drops=drops).at("B") == (1000, 2000)
    written = [*ops, O("C", 1, "", "x"), O("D", 1, "x")]
    assert see([x], written, machine(device=3), drops=drops).at("B") == (1000, 2000)
    # read again: it must stay, and B cannot have its 3 bytes
    assert not see([x], [*ops, O("C", 1, "x")], machine(device=3), drops=drops).timeline.valid


@pytest.mark.parametrize("kind", ["weight", "state", "output", "gradient"])
def test_what_the_step_is_for_never_goes_without_another_copy(kind):
    ops, drops = [O("A", 1, "", "t")], [D("t@device", "A")]
    assert see([T("t", 3, kind)], ops, drops=drops).rules == {"missing-write-back"}
    moves = [M("m", "t", "device>host", "A")]
    assert see([T("t", 3, kind)], ops, moves=moves, drops=drops).timeline.valid


def test_a_gradient_that_an_op_has_read_may_go():
    ops = [O("B", 1, "", "g"), O("U", 1, "g")]
    assert see([T("g", 3, "gradient")], ops, drops=[D("g@device", "U")]).timeline.valid


def test_a_drop_of_a_copy_that_is_not_there_does_nothing():
    w = T("w", 3, home="host")
    moves = [M("m", "w", "host>device", "A", "B")]
    seen = see([w], [O("A", 1), O("B", 1, "w")], moves=moves, drops=[D("w@device", "A")])
    assert seen.at("B") == (4000, 5000)


def test_a_read_of_a_copy_whose_drop_is_pending():
    w, drops = T("w", 3, home="device"), [D("w@device", "A")]
    moves = [M("m", "w", "device>host", "A")]
    ops = [O("A", 1, "w"), O("B", 1, "w")]
    assert see([w], ops, moves=moves, drops=drops).rules == {"read-after-drop"}


def test_an_op_that_overwrites_leaves_the_drop_pending():
    w, drops = T("w", 3, home="device"), [D("w@device", "A")]
    ops = [O("A", 1, "w"), O("B", 1, "", "w"), O("C", 1, workspace_bytes=3)]
    moves = [M("m", "w", "device>host", "B")]
    seen = see([w], ops, machine(device=3), moves=moves, drops=drops)
    assert seen.at("C") == (5000, 6000)  # B 1–2, m 2–5, and only then is w gone


# Values that die by themselves


@pytest.mark.parametrize("kind", ["activation", "temporary"])
def test_a_value_dies_after_its_last_reader_or_after_its_writer(kind):
    a = T("a", 3, kind)
    ops = [O("F", 1, "", "a"), O("G", 1, "a"), O("H", 1, workspace_bytes=3)]
    assert see([a], ops, machine(device=3)).at("H") == (2000, 3000)
    unread = [O("F", 1, "", "a"), O("H", 1, workspace_bytes=3)]
    assert see([a], unread, machine(device=3)).at("H") == (1000, 2000)


@pytest.mark.parametrize("kind", ["gradient", "input", "output"])
def test_other_kinds_do_not_die(kind):
    ops = [O("F", 1, "", "t"), O("G", 1, "t"), O("H", 1, workspace_bytes=3)]
    assert "no-space" in see([T("t", 3, kind)], ops, machine(device=3)).rules
    steady = see([T("t", 3, kind)], ops, start="")
    assert steady.rules == {"steady"}


def test_it_dies_on_every_tier_once_no_move_uses_it():
    a, x = T("a", 3, "activation"), T("x", 4, "input", "disk")
    ops = [O("F", 1, "", "a"), O("G", 1, "a"), O("H", 1, workspace_bytes=3)]
    moves = [M("m", "a", "device>host", "F"), M("n", "x", "disk>host", "G")]
    seen = see([a, x], ops, machine(device=3, host=4), moves=moves)
    # dead at 2000, but m reads one copy and fills the other until 4000
    assert (seen.at("m"), seen.at("H"), seen.at("n")) == ((1000, 4000), (4000, 5000), (4000, 8000))


# Recomputation


def chain(recompute=True):
    a, c = T("a", 3, "activation"), T("c", 1, "activation")
    ops = [
        O("F", 2, "x", "a", recompute=recompute),
        O("G", 1, "a", "c"),
        O("H", 1, "", "", workspace_bytes=3),
        O("B", 1, "a c"),
    ]
    return [T("x", 1, "input", "device"), a, c], ops


def test_a_value_is_gone_between_its_reader_and_its_recomputation():
    tensors, ops = chain()
    seen = see(tensors, ops, machine(device=5), recomputes=[Recompute("F", "B")])
    # a dies at 3000, so H has its 3 bytes beside x and c; F runs again at 4000, then B
    assert (seen.at("H"), seen.at("F@B"), seen.at("B")) == (
        (3000, 4000),
        (4000, 6000),
        (6000, 7000),
    )
    assert seen.peak["device"] == 5
    assert "no-space" in see(tensors, ops, machine(device=5)).rules


def test_names_mean_the_first_run_unless_they_say_which():
    tensors, ops = chain()
    w = T("w", 1, home="host")
    moves = [M("m", "w", "host>device", "F", "F@B"), M("n", "w", "host>disk", "F@B")]
    seen = see([*tensors, w], ops, recomputes=[Recompute("F", "B")], moves=moves)
    assert (seen.at("m"), seen.at("n")) == ((2000, 3000), (6000, 7000))
    again = see([*tensors, w], ops, moves=[M("m", "w", "host>device", "F", "F@B")])
    assert again.rules == {"unknown-id"}


def test_several_recomputations_run_in_the_plans_order():
    a, b = T("a", 1, "activation"), T("b", 1, "activation")
    ops = [
        O("F", 1, "", "a", recompute=True),
        O("G", 1, "", "b", recompute=True),
        O("B", 1, "a b"),
    ]
    seen = see([a, b], ops, recomputes=[Recompute("G", "B"), Recompute("F", "B")])
    assert (seen.at("G@B"), seen.at("F@B")) == ((2000, 3000), (3000, 4000))


def test_directs_hold_for_recomputations():
    a, w = T("a", 1, "activation"), T("w", 5, home="host")
    ops = [O("F", 1, "w", "a", direct={"w": 3}, recompute=True), O("B", 1, "a")]
    plan = {"directs": [Direct("F", "w")], "recomputes": [Recompute("F", "B")]}
    seen = see([a, w], ops, machine(device=1), **plan)
    assert (seen.at("F"), seen.at("F@B")) == ((0, 3000), (3000, 6000))


def test_only_ops_that_allow_it_run_again():
    tensors, ops = chain(recompute=False)
    assert see(tensors, ops, recomputes=[Recompute("F", "B")]).rules == {"recompute"}


# Host updates


def update(name, us, operands, **more):
    return O(name, 9, operands, operands.split()[0], phase="update", host_duration_us=us, **more)


def test_host_updates_run_beside_compute_in_op_order_once_their_operands_are_there():
    v, w = T("v", 1, home="host"), T("w", 1, home="host")
    g = T("g", 2, "gradient")
    ops = [O("B", 1, "", "g"), update("U", 3, "w g"), update("V", 2, "v"), O("C", 4)]
    plan = {"updates": [Update("w", "host"), Update("v", "host")]}
    seen = see([v, w, g], ops, moves=[M("m", "g", "device>host", "B")], **plan)
    # B 0–1, m 1–3, U 3–6; V is ready from the start but keeps its turn; C does not wait
    assert (seen.at("U"), seen.at("V"), seen.at("C")) == ((3000, 6000), (6000, 8000), (1000, 5000))
    assert {s.lane for s in seen.timeline.spans if s.id in "UV"} == {"host_compute"}
    assert seen.makespan_ns == 8000


def test_host_updates_and_ops_keep_their_order_where_they_touch_the_same_tensor():
    w = T("w", 1, home="host")
    ops = [
        O("F", 4, "w", direct={"w": 4}),
        update("U", 3, "w"),
        O("A", 1),
        O("G", 1, "w", direct={"w": 1}),
    ]
    directs = [Direct("F", "w"), Direct("G", "w")]
    seen = see([w], ops, directs=directs, updates=[Update("w", "host")])
    spans = [seen.at(x) for x in "FUAG"]
    assert spans == [(0, 4000), (4000, 7000), (4000, 5000), (7000, 8000)]


def test_workspace_of_a_host_update_is_on_the_host():
    w = T("w", 1, home="host")
    ops = [update("U", 3, "w", workspace_bytes=4)]
    seen = see([w], ops, machine(device=0, host=5), updates=[Update("w", "host")])
    assert seen.peak == {"device": 0, "host": 5, "disk": 0}
    full = see([w], ops, machine(host=4), updates=[Update("w", "host")])
    assert "no-space" in full.rules


def test_an_update_without_a_host_duration_stays_on_the_device():
    w, ops = T("w", 1, home="device"), [update("U", None, "w")]
    assert see([w], ops, updates=[Update("w", "host")]).rules == {"update"}
    assert see([w], ops, updates=[Update("w", "device")]).at("U") == (0, 9000)


# The end of a step, settling, peaks


def test_a_steady_problem_settles_when_two_steps_are_the_same():
    seen = see([], [O("A", 2), O("B", 1)], start="")
    assert seen.timeline.steps == ((0, 3000), (3000, 6000))
    assert seen.timeline.settled and seen.timeline.note is None
    assert seen.makespan_ns == 3000


def test_eight_steps_that_do_not_settle_end_with_a_note():
    tensors = [T(t, 4, "input") for t in "xyz"]
    lanes = tuple(Lane(n, "device", "host", 1) for n in ("one", "two", "three"))
    on = Machine((Tier("device"), Tier("host")), lanes)
    moves = [
        M("m", "x", "device>host", None, wraps=True, lane="one"),
        M("n", "y", "device>host", "m", wraps=True, lane="two"),
        M("o", "z", "device>host", "n", wraps=True, lane="three"),
    ]
    drops = [D("x@host", "m"), D("y@host", "n"), D("z@host", "o")]
    start = "x@device y@device z@device"
    seen = see(tensors, [O("A", 5)], on, start, moves=moves, drops=drops)
    # m n o take 12 in all, and a step may not end before the o of the step before it: from
    # S(0) = 0, S(1) = 5 on, S(k+2) = S(k) + 12 (m finds its lane free: 4 < 5): 5 and 7 by turns
    lengths = [end - begin for begin, end in seen.timeline.steps]
    assert lengths == [5000, 7000] * 4
    assert not seen.timeline.settled and seen.timeline.note
    assert seen.makespan_ns == 7000


def test_a_lane_busier_than_the_last_step_gives_the_makespan_of_what_does_not_settle():
    w = T("w", 9, "input")
    plan = {"moves": [M("m", "w", "device>host", wraps=True)], "drops": [D("w@host", "m")]}
    # m takes 4.5 and a step 4: the k-th m (from 0) ends at 4.5k + 4.5, no later than its next
    # step's end at 4k + 8 for the 8 steps that are tried, though the lane falls ever further behind
    seen = see([w], [O("A", 4)], machine(d2h=2), start="w@device", **plan)
    assert {end - begin for begin, end in seen.timeline.steps} == {4000}
    assert len(seen.timeline.steps) == 8 and not seen.timeline.settled
    assert seen.makespan_ns == 4500
    # a lane that falls behind faster holds the steps up, and they settle at its pace
    seen = see([w], [O("A", 1)], machine(d2h=2), start="w@device", **plan)
    assert seen.timeline.settled and seen.makespan_ns == 4500


def test_a_start_over_a_capacity():
    assert see([T("w", 5, home="device")], [O("F", 1)], machine(device=4)).rules == {"no-space"}


def test_the_peak_is_the_maximum_over_all_steps():
    w = T("w", 3)
    moves = [M("in", "w", "host>device", "B", "F", wraps=True)]
    ops = [O("F", 1, "w"), O("B", 5), O("C", 4, workspace_bytes=2)]
    seen = see([w], ops, start="w@host w@device", moves=moves, drops=[D("w@device", "F")])
    # in 6–9 beside C 6–10 in every step: 3 + 2 bytes
    assert seen.peak == {"device": 5, "host": 3, "disk": 0}


def test_a_deadlock_says_what_waits():
    moves = [M("a", "w", "host>device", "b"), M("b", "w", "host>disk", "a")]
    seen = see([T("w", 1, home="host")], [O("F", 1)], moves=moves)
    assert seen.rules & {"deadlock", "late-move"}
    assert any("a" in v.detail and "b" in v.detail for v in seen.timeline.violations)
