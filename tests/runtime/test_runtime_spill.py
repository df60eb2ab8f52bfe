"""Spill files on a real disk: what is put comes back, from files that nobody sees; and refusals."""

from __future__ import annotations

import fcntl
import gc
import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spill_files import descriptors, filled

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.disk.directories import filesystem_type
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")

MIB = 1 << 20
PAGE = 4096

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
unprivileged = pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(40 * MIB)


# -- what goes out comes back ----------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3])
def test_extents_come_back_byte_for_byte(tmp_path: Path, arena: Arena, count: int) -> None:
    places = [tmp_path / str(i) for i in range(count)]
    for place in places:
        place.mkdir()
    with SpillStore(places, stripe_bytes=MIB) as store:
        sizes = [1, PAGE, 5 * MIB // 2, 9 * MIB]
        extents = [store.allocate(size) for size in sizes]
        data = [filled(arena, size, seed) for seed, size in enumerate(sizes)]
        for extent, view in zip(extents, data, strict=True):
            store.write(extent, 0, view)
        total = sum(len(view) for view in data)
        assert store.used_bytes == store.peak_bytes == store.bytes_written == total
        for extent, view in zip(extents, data, strict=True):
            back = arena.block(extent.nbytes).view
            store.read(extent, 0, back)
            assert back == view
        # a part across two stripes
        back = arena.block(2 * PAGE).view
        store.read(extents[3], MIB - PAGE, back)
        assert back == data[3][MIB - PAGE : MIB + PAGE]
        assert store.bytes_read == total + 2 * PAGE
        for extent in extents:
            store.release(extent)
        assert store.used_bytes == 0
        assert store.peak_bytes == total


def test_stripes_go_to_the_directories_in_turn(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    with SpillStore(places, stripe_bytes=MIB) as store:
        first, second = store.allocate(4 * MIB), store.allocate(MIB + 1)
        assert [piece.file for piece in first.pieces] == [0, 1, 0, 1]
        assert [piece.file for piece in second.pieces] == [0, 1]
        # in each file one after the other
        assert [piece.offset for piece in first.pieces] == [0, 0, MIB, MIB]
        assert [piece.offset for piece in second.pieces] == [2 * MIB, 2 * MIB]


def test_the_log_goes_on_at_its_head_and_wraps(tmp_path: Path) -> None:
    with SpillStore([tmp_path], capacity_bytes=8 * MIB) as store:
        extents = [store.allocate(2 * MIB) for _ in range(3)]
        store.release(extents[0])
        # not into the gap behind it: writes stay sequential
        assert store.allocate(2 * MIB).pieces[0].offset == 6 * MIB
        assert store.allocate(2 * MIB).pieces[0].offset == 0
        assert store.file_bytes == 8 * MIB


def test_scattered_room_is_room_all_the_same(tmp_path: Path, arena: Arena) -> None:
    with SpillStore([tmp_path], capacity_bytes=8 * MIB) as store:
        extents = [store.allocate(MIB) for _ in range(8)]
        for extent in extents[1::2]:
            store.release(extent)
        kept = filled(arena, MIB)
        store.write(extents[2], 0, kept)
        extent = store.allocate(4 * MIB)
        assert [piece.offset for piece in extent.pieces] == [MIB, 3 * MIB, 5 * MIB, 7 * MIB]
        view, back = filled(arena, 4 * MIB, 1), arena.block(4 * MIB).view
        store.write(extent, 0, view)
        store.read(extent, 0, back)
        assert back == view
        store.read(extents[2], 0, back[:MIB])
        assert back[:MIB] == kept
        with pytest.raises(SpillFull, match="no room for 1 bytes"):
            store.allocate(1)


def test_the_files_never_outgrow_the_capacity(tmp_path: Path) -> None:
    with SpillStore([tmp_path, tmp_path], 10 * PAGE, stripe_bytes=4 * PAGE) as store:
        for size, taken in ((4, 5), (4, 9), (2, 10)):
            assert store.allocate(size * PAGE).padded_nbytes == size * PAGE
            assert store.file_bytes == taken * PAGE
        with pytest.raises(SpillFull, match="capacity: 40960 bytes"):
            store.allocate(1)


SIZES = st.lists(st.tuples(st.booleans(), st.integers(1, 40 * PAGE)), max_size=40)


@given(SIZES, st.integers(1, 3), st.sampled_from([PAGE, 4 * PAGE]))
def test_extents_never_overlap_and_fill_the_capacity(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[bool, int]],
    count: int,
    stripe_bytes: int,
) -> None:
    capacity = 100 * PAGE
    place = tmp_path_factory.getbasetemp()
    with SpillStore([place] * count, capacity, stripe_bytes) as store:
        live: list[Extent] = []
        peak = 0
        for releases, size in steps:
            used = sum(extent.padded_nbytes for extent in live)
            if releases and live:
                store.release(live.pop(size % len(live)))
            elif used + -(-size // PAGE) * PAGE > capacity:
                with pytest.raises(SpillFull):
                    store.allocate(size)
            else:
                live.append(store.allocate(size))
            used = sum(-(-extent.nbytes // PAGE) * PAGE for extent in live)
            peak = max(peak, used)
            assert (store.used_bytes, store.peak_bytes) == (used, peak)
            assert store.file_bytes <= capacity
            pages = [
                (piece.file, at)
                for extent in live
                for piece in extent.pieces
                for at in range(piece.offset, piece.offset + piece.nbytes, PAGE)
            ]
            assert len(set(pages)) == len(pages) == used // PAGE


def test_many_threads_at_once(tmp_path: Path) -> None:
    arena = Arena(0)
    wrong: list[int] = []
    with SpillStore([tmp_path, tmp_path], stripe_bytes=64 * PAGE) as store:

        def work(seed: int) -> None:
            for turn in range(15):
                size = (turn * 37 % 11 + 1) * 20 * PAGE
                extent, view, back = store.allocate(size), filled(arena, size, seed), None
                store.write(extent, 0, view)
                back = arena.block(size).view
                store.read(extent, 0, back)
                if back != view:
                    wrong.append(seed)
                store.release(extent)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert store.used_bytes == 0
        assert (
            store.bytes_read
            == store.bytes_written
            == 4 * sum((turn * 37 % 11 + 1) * 20 * PAGE for turn in range(15))
        )


def test_releases_from_the_garbage_collector_do_not_wait(tmp_path: Path) -> None:
    class Ticket:
        def __init__(self, store: SpillStore) -> None:
            self.store, self.extent, self.me = store, store.allocate(PAGE), self

        def __del__(self) -> None:
            self.store.release(self.extent)

    before = gc.get_threshold()
    gc.set_threshold(1)  # collects inside of the store's own lines, its lock taken
    try:
        with SpillStore([tmp_path], capacity_bytes=MIB) as store:
            for _ in range(200):
                Ticket(store)
            gc.collect()
            assert store.used_bytes == 0
            assert store.peak_bytes > 0
    finally:
        gc.set_threshold(*before)


# -- the files -------------------------------------------------------------------------------------


@linux
@pytest.mark.parametrize("unnamed", [True, False], ids=["O_TMPFILE", "unlinked"])
def test_files_are_direct_private_and_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unnamed: bool
) -> None:
    if not unnamed:
        monkeypatch.setattr("offcompile.runtime.disk.spill_file._O_TMPFILE", 0)
    before = set(descriptors())
    with SpillStore([tmp_path]) as store:
        (opened,) = set(descriptors()) - before
        told = os.fstat(int(opened))
        assert list(tmp_path.iterdir()) == []
        assert stat.S_IMODE(told.st_mode) == 0o600
        assert told.st_nlink == 0
        flags = fcntl.fcntl(int(opened), fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) is store.direct
        assert not os.get_inheritable(int(opened))
        assert told.st_size == 0
        store.allocate(1)
        taken = os.fstat(int(opened))
        assert taken.st_size == store.file_bytes == 64 * MIB
        assert taken.st_blocks * 512 >= 64 * MIB  # room that nobody else can take any more
    assert set(descriptors()) == before
    if filesystem_type(tmp_path) in ("ext4", "xfs", "btrfs"):
        assert store.direct


@linux
def test_without_direct_io_everything_works_through_the_page_cache(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offcompile.runtime.disk.spill_file._O_DIRECT", 0)
    with SpillStore([tmp_path]) as store:
        assert not store.direct
        extent, view, back = store.allocate(MIB), filled(arena, MIB), arena.block(MIB).view
        store.write(extent, 0, view)
        store.flush()
        store.read(extent, 0, back)
        assert back == view


@linux
def test_no_descriptor_is_left_by_a_store_that_is_dropped_or_fails_to_open(tmp_path: Path) -> None:
    before = descriptors()
    store = SpillStore([tmp_path])
    assert len(descriptors()) == len(before) + 1
    del store
    assert descriptors() == before
    with pytest.raises(OffloadError, match="does not exist"):
        SpillStore([tmp_path, tmp_path / "missing"])
    gc.collect()
    assert descriptors() == before


def test_a_closed_store_says_so(tmp_path: Path, arena: Arena) -> None:
    store = SpillStore([tmp_path])
    extent = store.allocate(PAGE)
    store.close()
    store.close()
    for use in (
        lambda: store.allocate(1),
        lambda: store.write(extent, 0, arena.block(PAGE).view),
        store.flush,
    ):
        with pytest.raises(OffloadError, match="closed"):
            use()
    store.release(extent)  # tickets may die later than the store


def test_a_mapping_opens_only_what_it_is_told() -> None:
    mapping = Mapping(5 * MIB + 1)
    assert mapping.nbytes % PAGE == 0
    assert mapping.address % (2 * MIB) == 0
    mapping.open(0, PAGE)
    mapping.view(0, PAGE)[:] = bytes([1]) * PAGE
    assert mapping.view(0, 2).tobytes() == b"\1\1"
