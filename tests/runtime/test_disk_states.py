"""States on disk: what was written comes back, in any order, with few blocks in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from disk_states_made import BF16, BLOCK, F32, F64, Make, count, making, put, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.state_blocks import GRAIN, cut, padded_bytes

pytestmark = pytest.mark.usefixtures("on_a_disk")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from making(tmp_path)


# -- what goes out comes back ----------------------------------------------------------------------


@pytest.mark.parametrize("dtypes", [[F32], [F32, F32], [F32, BF16, BF16], [F64, torch.uint8]])
def test_states_begin_as_zeros_and_keep_what_is_written(
    make: Make, dtypes: list[torch.dtype]
) -> None:
    states = make(block_bytes=GRAIN * 16)
    numel = 5 * GRAIN + 7
    states.add(3, numel, dtypes)
    assert all(not v.any() and v.numel() == numel for v in values(states, 3))
    torch.manual_seed(0)
    wanted = [torch.randint(0, 100, (numel,)).to(dtype) for dtype in dtypes]
    put(states, 3, wanted)
    states.settle()
    back = values(states, 3)
    assert [v.dtype for v in back] == dtypes
    assert all(torch.equal(a, b) for a, b in zip(back, wanted, strict=True))


def test_ranges_cover_the_parameter_in_order_and_suit_vector_kernels(make: Make) -> None:
    states = make()
    states.add(0, 10 * GRAIN + 1, [F32, F32])
    found = []
    for r in states.visit(0):
        assert all(part.data_ptr() % 4096 == 0 and part.is_contiguous() for part in r.parts)
        assert all(part.numel() == r.stop - r.start for part in r.parts)
        found.append((r.start, r.stop))
    assert len(found) > 4
    assert found[0][0] == 0 and found[-1][1] == 10 * GRAIN + 1
    assert all(a[1] == b[0] and b[0] % GRAIN == 0 for a, b in pairwise(found))


@given(
    numel=st.integers(1, 50 * GRAIN),
    widths=st.lists(st.sampled_from([F32, BF16, F64, torch.uint8]), min_size=1, max_size=4),
    grains=st.integers(1, 8),
)
def test_blocks_are_within_bounds(numel: int, widths: list[torch.dtype], grains: int) -> None:
    most = grains * GRAIN * sum(d.itemsize for d in widths)
    blocks = cut(numel, widths, most)
    assert [b for b, _ in blocks] == [0, *(e for _, e in blocks[:-1])] and blocks[-1][1] == numel
    assert all(0 < padded_bytes(e - b, widths) <= most for b, e in blocks)


def test_parts_of_a_block_lie_side_by_side_and_move_in_one_call(make: Make) -> None:
    moved: list[tuple[str, int, int]] = []

    def read(descriptor: int, views: Sequence[memoryview], at: int) -> int:
        moved.append(("read", at, len(views[0])))
        return os.preadv(descriptor, views, at)

    def write(descriptor: int, views: Sequence[memoryview], at: int) -> int:
        moved.append(("write", at, len(views[0])))
        return os.pwritev(descriptor, views, at)

    states = make(files=Files(preadv=read, pwritev=write))
    states.add(0, 20 * GRAIN, [F32, F32])
    moved.clear()
    count(states, 0)
    states.settle()
    assert [(what, n) for what, _, n in moved] == [("write", BLOCK)] * 20
    assert [at for _, at, _ in moved] == [i * BLOCK for i in range(20)]  # one after the other
    states.expect([0])
    moved.clear()
    count(states, 0)
    states.settle()
    reads = [at for what, at, _ in moved if what == "read"]
    assert sorted(set(reads)) == [i * BLOCK for i in range(20)]


def test_several_directories_share_the_blocks(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    states = DiskStates(places, block_bytes=BLOCK, small_bytes=0)
    assert states.directories == tuple(places)
    wanted = [torch.arange(9.0 * GRAIN), torch.arange(9.0 * GRAIN) + 1]
    states.add(0, 9 * GRAIN, [F32, F32])
    put(states, 0, wanted)
    assert all(torch.equal(a, b) for a, b in zip(values(states, 0), wanted, strict=True))
    states.close()


def test_small_states_stay_in_memory(make: Make) -> None:
    states = make(small_bytes=1024)
    states.add(0, 128, [F32, F32])
    states.add(1, 129, [F32, F32])
    states.add(2, 0, [F32])
    for _ in range(3):
        for key in range(3):
            count(states, key)
    facts = states.facts()
    assert facts.disk_bytes == 2 * 4096
    assert facts.resident_bytes == 1024
    assert [values(states, k)[0].tolist() for k in range(3)] == [[3.0] * 128, [3.0] * 129, []]
    states.remove(0)
    with pytest.raises(OffloadError, match="no states of key 0"):
        states.visit(0)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffers", [3, 4, 6])
def test_memory_stays_within_the_pool(make: Make, buffers: int) -> None:
    states = make(buffers=buffers)
    for key in range(4):
        states.add(key, 10 * GRAIN, [F32, F32])
    states.expect([3, 2, 1, 0])
    for step in range(3):
        for key in (3, 2, 1, 0):
            count(states, key)
        states.step_over()
        assert values(states, step)[0].unique().tolist() == [step + 1.0]
    facts = states.facts()
    assert facts.limit_bytes == buffers * BLOCK
    assert 0 < facts.frame_bytes <= facts.peak_frame_bytes <= facts.limit_bytes
    assert facts.disk_bytes == 40 * BLOCK


def test_sizes_that_differ_share_the_pool(make: Make) -> None:
    states = make(block_bytes=8 * BLOCK, buffers=3)
    sizes = [8 * GRAIN, GRAIN, 3 * GRAIN, 17 * GRAIN, 100, 2 * GRAIN + 1]
    for key, numel in enumerate(sizes):
        states.add(key, numel, [F32, F32])
    states.expect(range(len(sizes)))
    for _ in range(4):
        for key in range(len(sizes)):
            count(states, key)
        states.step_over()
    assert all(values(states, k)[1].unique().tolist() == [4.0] for k in range(len(sizes)))
    assert states.facts().peak_frame_bytes <= 24 * BLOCK


@pytest.mark.parametrize("kept", [0, 1, 5, 11, 12, 20])
def test_of_blocks_that_come_in_turn_as_many_stay_as_there_is_room_for(
    make: Make, kept: int
) -> None:
    blocks = 12
    states = make(kept * BLOCK)
    for key in range(3):
        states.add(key, 4 * GRAIN, [F32, F32])
    states.expect(range(3))
    for step in range(5):
        before = states.facts()
        for key in range(3):
            count(states, key)
        states.settle()
        states.step_over()
        after = states.facts()
        moving = max(0, blocks - kept)
        assert after.bytes_written - before.bytes_written == moving * BLOCK
        if step:
            # a read ahead counts when it is made: in the end there is one for each block
            assert after.bytes_read - before.bytes_read <= (moving + 3) * BLOCK
    assert states.facts().bytes_read <= (4 * moving + 3) * BLOCK
    assert states.facts().resident_bytes == min(kept, blocks) * BLOCK
    assert states.facts().step_bytes_written == moving * BLOCK
    assert values(states, 0)[0].unique().tolist() == [5.0]


def test_read_only_visits_write_nothing(make: Make) -> None:
    states = make()
    states.add(0, 20 * GRAIN, [F32, F32])
    count(states, 0)
    states.settle()
    before = states.facts().bytes_written
    values(states, 0)
    values(states, 0)
    states.settle()
    assert states.facts().bytes_written == before


def test_nothing_is_read_that_was_never_written(make: Make) -> None:
    states = make()
    states.add(0, 20 * GRAIN, [F32, F32])
    states.expect([0])
    assert not values(states, 0)[0].any()
    assert states.facts().bytes_read == 0


# -- orders ----------------------------------------------------------------------------------------


def test_orders_that_were_not_expected_are_right_all_the_same(make: Make) -> None:
    states = make(2 * BLOCK)
    for key in range(5):
        states.add(key, (key + 1) * GRAIN, [F32, F32])
    states.expect([0, 1, 2, 3, 4, 17])
    for order in ([4, 3, 2, 1, 0], [0, 2, 4, 1, 3], [3, 3, 3, 0, 1]):
        for key in order:
            count(states, key)
        states.step_over()
    sums = [values(states, key)[0].unique().tolist() for key in range(5)]
    assert sums == [[3.0], [3.0], [2.0], [5.0], [2.0]]


def test_a_visit_that_is_left_early_keeps_what_it_did(make: Make) -> None:
    states = make()
    states.add(0, 8 * GRAIN, [F32])
    visit = states.visit(0)
    for r in visit:
        r.parts[0].fill_(7)
        if r.start:
            break
    visit.close()  # type: ignore[attr-defined]
    found = values(states, 0)[0]
    assert found[: r.stop].unique().tolist() == [7.0]
    assert not found[r.stop :].any()


def test_visits_at_the_same_time_go_beyond_the_pool_but_not_for_long(make: Make) -> None:
    states = make(buffers=3)
    for key in range(6):
        states.add(key, GRAIN, [F32, F32])
    open_visits = [states.visit(key) for key in range(6)]
    for visit in open_visits:
        next(visit).parts[0].fill_(1)
    assert states.facts().frame_bytes == 6 * BLOCK
    for visit in open_visits:
        assert next(visit, None) is None
    states.settle()
    assert states.facts().frame_bytes <= 3 * BLOCK
    assert all(values(states, key)[0].unique().tolist() == [1.0] for key in range(6))


def test_threads_may_visit_at_the_same_time(make: Make) -> None:
    states = make(2 * BLOCK)
    for key in range(4):
        states.add(key, 6 * GRAIN, [F32, F32])
    states.expect(range(4))
    failed: list[BaseException] = []

    def work(keys: Sequence[int]) -> None:
        try:
            for _ in range(10):
                for key in keys:
                    count(states, key)
        except BaseException as error:
            failed.append(error)

    both = [threading.Thread(target=work, args=(keys,)) for keys in ((0, 1), (3, 2))]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert not failed and not any(t.is_alive() for t in both)
    assert all(values(states, key)[1].unique().tolist() == [10.0] for key in range(4))


class _Twin:
    """A store and the dictionary that it has to agree with."""

    def __init__(self, states: DiskStates) -> None:
        self.states = states
        self.wanted: dict[int, list[torch.Tensor]] = {}

    def do(self, what: str, key: int, size: int) -> None:
        if what == "add" and key not in self.wanted:
            numel = size * GRAIN // 2 + key
            self.states.add(key, numel, [F32, BF16])
            self.wanted[key] = [torch.zeros(numel), torch.zeros(numel, dtype=BF16)]
        elif what == "expect":
            self.states.expect([key, size, *self.wanted])
        elif what == "settle":
            self.states.settle()
        elif what == "step":
            self.states.step_over()
        elif key in self.wanted:
            self.do_with(what, key, size)

    def do_with(self, what: str, key: int, size: int) -> None:
        if what == "remove":
            self.states.remove(key)
            del self.wanted[key]
        elif what == "write":
            for r in self.states.visit(key):
                for part, whole in zip(r.parts, self.wanted[key], strict=True):
                    here = whole[r.start : r.stop]
                    assert torch.equal(part, here)
                    here.add_(torch.arange(r.start, r.stop).remainder(size + 2).to(part.dtype))
                    part.copy_(here)
        elif what == "read":
            found = values(self.states, key)
            assert all(torch.equal(a, b) for a, b in zip(found, self.wanted[key], strict=True))


ACTIONS = st.sampled_from(["add", "add", "write", "write", "read", "expect", "settle"])
STEPS = st.tuples(
    ACTIONS | st.sampled_from(["remove", "step"]), st.integers(0, 4), st.integers(1, 9)
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(steps=st.lists(STEPS, max_size=40), kept=st.integers(0, 6), buffers=st.integers(3, 6))
def test_any_sequence_agrees_with_a_dictionary(
    tmp_path: Path, steps: list[tuple[str, int, int]], kept: int, buffers: int
) -> None:
    states = DiskStates(
        [tmp_path], kept * BLOCK, block_bytes=BLOCK, buffers=buffers, small_bytes=9000
    )
    twin = _Twin(states)
    try:
        for step in steps:
            twin.do(*step)
        for key in twin.wanted:
            twin.do_with("read", key, 0)
        facts = states.facts()
        assert facts.peak_frame_bytes <= facts.limit_bytes
    finally:
        states.close()


# -- refusals --------------------------------------------------------------------------------------


def test_refusals_name_what_is_wrong(make: Make, tmp_path: Path) -> None:
    states = make()
    states.add(0, GRAIN, [F32])
    with pytest.raises(OffloadError, match="key 0 are here already"):
        states.add(0, 5, [F32])
    with pytest.raises(OffloadError, match="no states of key 1"):
        states.visit(1)
    with pytest.raises(OffloadError, match="no states of key 1"):
        states.remove(1)
    visit = states.visit(0)
    next(visit)
    with pytest.raises(OffloadError, match="being visited"):
        states.remove(0)
    visit.close()  # type: ignore[attr-defined]
    with pytest.raises(OffloadError, match=r"block_bytes=4096 is too small .* give at least 16384"):
        make(block_bytes=4096).add(0, GRAIN, [F32])
    with pytest.raises(OffloadError, match="buffers=2"):
        make(buffers=2)
    with pytest.raises(OffloadError, match=r"does not exist.*directory=\"/path\""):
        DiskStates([tmp_path / "missing"])
