"""Shared links by hand: what crosses one slows down moves, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offcompile.ir import (
    Direct,
    InvalidInput,
    Lane,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    SharedLink,
    Span,
    Start,
    Tensor,
    Tier,
    Timeline,
)
from offcompile.ir.jsonio import machine_from_json, machine_to_json
from offcompile.ir.textio import parse_machine, print_machine
from offcompile.ir.verify import check_timeline
from offcompile.simulate import simulate

LANES = (Lane("h2d", "host", "device", 10.0), Lane("d2h", "device", "host", 10.0))
#: reads in place, and copies into the device
LINK_IN = SharedLink("link_in", 10.0, ("h2d",), in_place_reads=True)
#: copies both ways, with less than twice the rate of one way
BOTH_WAYS = SharedLink("both_ways", 15.0, ("h2d", "d2h"))

PROBLEM = Problem(
    (
        Tensor("w0", 100, "weight", "host"),
        Tensor("w1", 100, "weight", "host"),
        Tensor("x", 100, "input", "device"),
    ),
    (
        Op("F0", "forward", 10.0, ("w0",), direct={"w0": 20.0}),
        Op("F1", "forward", 10.0, ("w1", "x")),
    ),
)
START = (Start("w0", "host"), Start("w1", "host"), Start("x", "device"))
LOAD = Move("m", "w1", "host", "device", "h2d", None, "F1")
READ_IN_PLACE = Plan(START, (LOAD,), directs=(Direct("F0", "w0"),))


def machine(*shared: SharedLink) -> Machine:
    return Machine((Tier("device"), Tier("host")), LANES, shared=shared)


def span_of(timeline: Timeline, name: str) -> tuple[int, int]:
    (span,) = [s for s in timeline.spans if s.id == name]
    return span.start_ns, span.end_ns


def test_a_read_in_place_takes_its_bytes_from_the_copies_beside_it() -> None:
    """F0 reads 100 bytes in 20 µs, half of the link: a copy of 10 µs takes these 20 µs, too."""
    alone = simulate(PROBLEM, machine(), READ_IN_PLACE)
    shared = simulate(PROBLEM, machine(LINK_IN), READ_IN_PLACE)
    assert span_of(alone, "m") == (0, 10_000)
    assert span_of(shared, "m") == (0, 20_000)
    assert (alone.makespan_us, shared.makespan_us) == (30.0, 30.0)


def test_a_copy_goes_on_at_full_speed_when_the_read_is_over() -> None:
    problem = replace(PROBLEM, tensors=(*PROBLEM.tensors[:1], Tensor("w1", 300, "weight", "host"),
                                        PROBLEM.tensors[2]))  # fmt: skip
    shared = simulate(problem, machine(LINK_IN), READ_IN_PLACE)
    assert span_of(shared, "m") == (0, 40_000)  # 100 bytes in 20 µs, then 200 in 20 µs


def test_an_op_that_cannot_read_all_of_its_operand_takes_the_whole_link() -> None:
    slow = replace(LINK_IN, bytes_per_us=4.0)
    shared = simulate(PROBLEM, machine(slow), READ_IN_PLACE)
    assert span_of(shared, "F0") == (0, 20_000)
    assert span_of(shared, "m") == (0, 20_000 + 25_000)  # nothing was left for it before


def test_copies_both_ways_share_the_rate_of_both() -> None:
    away = Move("o", "x", "device", "host", "d2h", None, None)
    plan = Plan(START, (LOAD, away, Move("w", "w0", "host", "device", "h2d", None, "F0")))
    # two copies of 100 bytes run at three quarters of their speed, the third at full speed
    first, second = (span_of(simulate(PROBLEM, machine(BOTH_WAYS), plan), n) for n in ("m", "o"))
    assert first[1] == second[1] == 13_334  # 10 µs at 0.749999 of full speed, in whole ns


def test_the_audit_finds_a_copy_that_was_not_slowed_down() -> None:
    shared = simulate(PROBLEM, machine(LINK_IN), READ_IN_PLACE)
    assert not check_timeline(PROBLEM, machine(LINK_IN), READ_IN_PLACE, shared)
    spans = tuple(Span(s.id, s.lane, s.step, s.start_ns, 15_000) if s.id == "m" else s
                  for s in shared.spans)  # fmt: skip
    found = check_timeline(PROBLEM, machine(LINK_IN), READ_IN_PLACE, replace(shared, spans=spans))
    assert "of its work done" in found[0].detail


def test_an_op_may_be_called_like_a_lane() -> None:
    first = replace(PROBLEM.ops[0], id="h2d")
    problem = replace(PROBLEM, ops=(first, PROBLEM.ops[1]))
    plan = replace(READ_IN_PLACE, directs=(Direct("h2d", "w0"),))
    shared = simulate(problem, machine(LINK_IN), plan)
    assert span_of(shared, "m") == (0, 20_000)
    assert not check_timeline(problem, machine(LINK_IN), plan, shared)


def test_links_read_and_write_as_json_and_text() -> None:
    both = machine(LINK_IN, BOTH_WAYS)
    assert machine_from_json(machine_to_json(both)) == both
    assert parse_machine(print_machine(both)) == both
    assert "shared" not in machine_to_json(machine())


def test_a_link_of_an_unknown_lane_is_refused_by_name() -> None:
    wrong = machine_to_json(machine(LINK_IN))
    wrong["shared"][0]["lanes"] = ["h2dd"]
    with pytest.raises(InvalidInput, match=r"no lane is named \"h2dd\""):
        machine_from_json(wrong)
