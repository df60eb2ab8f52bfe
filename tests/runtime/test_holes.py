"""Plays through which pages go back to the system for want of room: none where there is room."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_layout import RECKONED, report_of

from offcompile.passes.build.layout import AddressStay, peak_bytes
from offcompile.planning import planned_layout as layout_module
from offcompile.report.report import PlanReport
from offcompile.runtime.memory.malloc.fragmentation import HeapLimit, Returns, returns_of
from offcompile.runtime.memory.malloc.heap import Heap

MIB = 1 << 20
GRAIN = 64 << 10
STAYS = st.lists(
    st.builds(
        lambda nbytes, first, length: AddressStay(nbytes, first, first + length),
        st.integers(0, 40).map(lambda n: n * 50_000),
        st.integers(0, 12),
        st.integers(0, 8),
    ),
    max_size=20,
)
SPLINTERS = st.sampled_from([0, 112])


@given(STAYS, SPLINTERS)
def test_with_room_for_all_nothing_goes_back(stays: list[AddressStay], splinter_bytes: int) -> None:
    ample = 2 * sum(stay.nbytes + splinter_bytes + GRAIN for stay in stays)
    assert returns_of(stays, HeapLimit(ample, splinter_bytes=splinter_bytes)) == Returns(0, 0)


@given(STAYS, SPLINTERS, st.integers(0, 100))
def test_no_more_is_touched_than_there_is(
    stays: list[AddressStay], splinter_bytes: int, percent: int
) -> None:
    room = HeapLimit(peak_bytes(stays) * percent // 100, splinter_bytes=splinter_bytes)
    found = returns_of(stays, room)
    most = sum((-(-stay.nbytes // GRAIN) + 1) * GRAIN for stay in stays if stay.nbytes)
    assert 0 <= found.touched_bytes <= most
    assert (found.trims > 0) or found.touched_bytes == 0


#: one that stays, behind the place of one that goes, and another of the same length as that
AROUND = [AddressStay(6 * MIB, 0, 1), AddressStay(MIB, 1, 9), AddressStay(6 * MIB, 2, 3)]


def test_a_hole_serves_the_next_of_its_length_and_with_splinters_it_does_not() -> None:
    room = HeapLimit(10 * MIB)
    assert returns_of(AROUND, room) == Returns(0, 0)
    found = returns_of(AROUND, replace(room, splinter_bytes=112))
    # both long ones find the pages of their places gone, which went for the other
    assert found.trims == 2
    assert 12 * MIB <= found.touched_bytes <= 13 * MIB + 4 * GRAIN


def test_pages_go_back_before_the_room_is_full() -> None:
    stays = [AddressStay(6 * MIB, 0, 1), AddressStay(MIB, 1, 9), AddressStay(7 * MIB, 2, 3)]
    assert returns_of(stays, HeapLimit(16 * MIB)) == Returns(0, 0)
    assert returns_of(stays, HeapLimit(16 * MIB, margin_bytes=4 * MIB)).trims == 2


def test_where_addresses_are_limited_large_blocks_have_pages_of_their_own() -> None:
    stays = [AddressStay(2 * MIB, 0, 0), AddressStay(MIB // 2, 0, 0)]
    room = HeapLimit(64 * MIB, mapped_bytes=MIB)
    assert returns_of(stays, room) == Returns(2 * MIB, 0)


def touched(report: PlanReport, room: HeapLimit | None) -> PlanReport:
    memory = replace(report.memory, room=room, touch_us_per_mib=250.0)
    return replace(report, memory=memory)


def test_a_report_counts_it_into_the_predicted_step() -> None:
    tight = report_of("minimum", hardware=RECKONED)
    room = HeapLimit(tight.budget_bytes, splinter_bytes=112)
    tight = touched(tight, room)
    assert tight.returns is not None and tight.returns.touched_bytes > 0
    touching_us = tight.returns.touched_bytes / MIB * 250.0
    assert tight.predicted_us == tight.result.cost_us + touching_us
    assert "are touched again" in tight.to_text()
    assert tight.to_json()["touched_again_bytes"] == tight.returns.touched_bytes
    roomy = touched(report_of("8GiB"), room)
    assert roomy.returns == Returns(0, 0) and roomy.predicted_us == roomy.planned_us
    assert roomy.to_json()["touched_again_bytes"] == 0
    assert "touched again" not in roomy.to_text()


def test_where_all_fits_the_largest_blocks_are_touched_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody keeps malloc from giving them back as soon as they are freed."""
    roomy = touched(report_of("8GiB"), HeapLimit(8 << 30))
    assert roomy.fits and roomy.returns == Returns(0, 0)
    least_bytes = 512 * 64 * 4  # what each layer makes
    monkeypatch.setattr(layout_module, "KEPT_BYTES", least_bytes)
    again = replace(roomy)
    made = [t.nbytes for t in again.problem.tensors if t.kind not in ("weight", "input")]
    large = sum(nbytes for nbytes in made if nbytes >= least_bytes)
    assert again.returns is not None and again.returns.trims == 0
    assert 0 < again.returns.touched_bytes <= large
    touching_us = again.returns.touched_bytes / MIB * 250.0
    assert again.predicted_us == again.planned_us + touching_us
    assert "in blocks that malloc does not keep" in again.to_text()


@given(STAYS, st.integers(0, 100))
def test_without_a_limit_only_blocks_with_mappings_of_their_own_are_touched_again(
    stays: list[AddressStay], percent: int
) -> None:
    mapped_bytes = 1 + max((s.nbytes for s in stays), default=0) * percent // 100
    found = returns_of(stays, HeapLimit(None, mapped_bytes=mapped_bytes))
    assert found.trims == 0
    assert found.touched_bytes <= sum(s.nbytes for s in stays if s.nbytes >= mapped_bytes)
    assert returns_of(stays, HeapLimit(None)) == Returns(0, 0)
    each = returns_of(stays, HeapLimit(None, mapped_bytes=1))
    assert each.touched_bytes == sum(s.nbytes for s in stays)


@pytest.mark.parametrize("gives_back", [True, False])
def test_there_is_a_room_only_where_malloc_gives_back(
    gives_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Heap, "gives_back", gives_back)
    report = report_of("minimum")
    memory = report.memory
    assert (memory.room is not None) == gives_back
    if memory.room is not None:
        assert memory.room.nbytes == report.budget_bytes and memory.touch_us_per_mib > 0
    else:
        assert report.returns is None


def test_what_moves_take_from_compute_is_in_the_predicted_step() -> None:
    # one that moves whatever accesses in place take on this machine
    tight = touched(report_of("minimum", policy="activation_spill"), None)
    toll_us, moves = tight.timeline.toll_us, len(tight.plan.moves)
    assert moves > 0 and toll_us >= moves * 300.0
    assert tight.predicted_us == tight.planned_us + toll_us
    assert f" that {moves} moves take from compute\n" in tight.to_text()
    roomy = report_of("8GiB")
    assert roomy.timeline.toll_us == 0.0 and roomy.predicted_us == roomy.planned_us
