"""Spill files on a real disk: what is put comes back, from files that nobody sees; and refusals."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import Mapping
from offcompile.runtime.disk import directories
from offcompile.runtime.disk.directories import (
    check_directory,
    default_directory,
    filesystem_type,
    free_bytes,
)
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.measure.disk import measure_disk
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")

MIB = 1 << 20
PAGE = 4096

linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
unprivileged = pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(40 * MIB)


def filled(arena: Arena, nbytes: int, seed: int = 0) -> memoryview:
    view = arena.block(nbytes).view
    np.frombuffer(view, np.uint8)[:] = np.random.default_rng(seed).integers(
        0, 256, len(view), np.uint8
    )
    return view


def descriptors(within: Path = Path("/")) -> list[str]:
    """The open files below a directory that have no name."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # the one that listed them
            continue
        if target.endswith("(deleted)") and target.startswith(str(within)):
            found.append(name)
    return found


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


# -- what goes wrong on the disk -------------------------------------------------------------------


def failing(code: int) -> Callable[..., int]:
    def call(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_short_transfers_are_carried_on(tmp_path: Path, arena: Arena) -> None:
    sizes: Iterator[int] = iter([])

    def short(whole: Callable[..., int]) -> Callable[..., int]:
        def call(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
            size = next(sizes, None)
            if size is None:
                return whole(descriptor, buffers, offset)
            # the disk moves whole pages; a count within a page is made up
            moved = -(-size // PAGE) * PAGE
            if moved:
                whole(descriptor, [buffers[0][:moved]], offset)
            return size

        return call

    files = Files(preadv=short(os.preadv), pwritev=short(os.pwritev))
    with SpillStore([tmp_path], files=files) as store:
        extent, view, back = store.allocate(MIB), filled(arena, MIB), arena.block(MIB).view
        sizes = iter([PAGE, 0, 5 * PAGE + 512, 100, 7 * PAGE])
        store.write(extent, 0, view)
        sizes = iter([0, 3 * PAGE, 1, 2 * PAGE + 5])
        store.read(extent, 0, back)
        assert back == view
        assert store.bytes_written == store.bytes_read == MIB
        sizes = iter([0] * 8)
        with pytest.raises(OffloadError, match=r"reading 1048576 bytes at 0 .*nothing was moved"):
            store.read(extent, 0, back)


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (errno.EIO, r"Input/output error, EIO\): check that disk"),
        (errno.ENOSPC, r"No space left on device, ENOSPC\): free space there"),
    ],
)
def test_errors_of_the_disk_name_the_place_and_the_fix(
    tmp_path: Path, arena: Arena, code: int, told: str
) -> None:
    files = Files(preadv=failing(code), pwritev=failing(code))
    with SpillStore([tmp_path], files=files) as store:
        extent, view = store.allocate(MIB), arena.block(MIB).view
        with pytest.raises(OffloadError, match=f"reading 1048576 bytes at 0 .*{told}") as caught:
            store.read(extent, 0, view)
        assert str(tmp_path) in str(caught.value)
        with pytest.raises(OffloadError, match=f"writing .*{told}.*another disk"):
            store.write(extent, 0, view)
        assert (store.bytes_written, store.bytes_read) == (0, 0)
        assert store.used_bytes == MIB
        store.close()  # waits for nothing


def test_after_a_failed_write_the_store_goes_on(tmp_path: Path, arena: Arena) -> None:
    broken = [True]

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if broken:
            broken.pop()
            raise OSError(errno.EIO, "once")
        return os.pwritev(descriptor, buffers, offset)

    with SpillStore([tmp_path], files=Files(pwritev=pwritev)) as store:
        extent, view, back = store.allocate(PAGE), filled(arena, PAGE), arena.block(PAGE).view
        with pytest.raises(OffloadError, match="EIO"):
            store.write(extent, 0, view)
        store.write(extent, 0, view)
        store.read(extent, 0, back)
        assert back == view


def test_a_full_disk_is_told_before_anything_is_taken(tmp_path: Path) -> None:
    asked: list[int] = []

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        asked.append(nbytes)

    files = Files(allocate=allocate, free_bytes=lambda descriptor: 20 * MIB + 5)
    with SpillStore([tmp_path], reserve_bytes=4 * MIB, files=files) as store:
        with pytest.raises(SpillFull) as caught:
            store.allocate(17 * MIB)
        message = str(caught.value)
        for part in (str(tmp_path), str(17 * MIB), str(16 * MIB), str(4 * MIB), "Free space there"):
            assert part in message
        assert (asked, store.file_bytes, store.used_bytes) == ([], 0, 0)


def test_two_directories_of_one_disk_do_not_count_its_room_twice(tmp_path: Path) -> None:
    files = Files(allocate=lambda *_: None, free_bytes=lambda descriptor: 16 * MIB)
    with SpillStore([tmp_path, tmp_path], reserve_bytes=0, files=files) as store:
        with pytest.raises(SpillFull):
            store.allocate(17 * MIB)
        assert store.file_bytes == 0


def test_growth_asks_for_less_when_the_disk_gives_less(tmp_path: Path) -> None:
    room, opened = [10 * MIB], list[int]()

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        if nbytes > room[0]:
            os.ftruncate(descriptor, offset + 3 * MIB)  # as real ones do: in part
            raise OSError(errno.ENOSPC, "full")
        os.ftruncate(descriptor, offset + nbytes)
        opened.append(descriptor)
        room[0] -= nbytes

    with SpillStore([tmp_path], files=Files(allocate=allocate)) as store:
        extents = [store.allocate(2 * MIB) for _ in range(5)]
        assert store.file_bytes == 10 * MIB
        with pytest.raises(SpillFull):
            store.allocate(2 * MIB)
        assert os.fstat(opened[0]).st_size == 10 * MIB
        store.release(extents[1])
        assert store.allocate(2 * MIB).pieces == extents[1].pieces
        assert store.used_bytes == 10 * MIB


def test_a_full_directory_leaves_its_turn_to_the_next(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    for place in places:
        place.mkdir()
    first: list[int] = []

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        first[:] = first or [descriptor]
        if descriptor == first[0] and offset + nbytes > MIB:
            raise OSError(errno.ENOSPC, "full")

    with SpillStore(places, stripe_bytes=MIB, files=Files(allocate=allocate)) as store:
        extent = store.allocate(4 * MIB)
        assert [piece.file for piece in extent.pieces] == [0, 1, 1, 1]


def test_files_that_cannot_be_preallocated_grow_as_they_are_written(
    tmp_path: Path, arena: Arena
) -> None:
    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "not here")

    with SpillStore([tmp_path], files=Files(allocate=allocate)) as store:
        extent, view, back = store.allocate(MIB), filled(arena, MIB), arena.block(MIB).view
        store.write(extent, 0, view)
        store.read(extent, 0, back)
        assert back == view


def test_a_disk_that_fails_while_growing_leaves_nothing_taken(tmp_path: Path) -> None:
    calls: list[int] = []

    def allocate(descriptor: int, offset: int, nbytes: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(errno.EIO, "broken")

    with SpillStore(
        [tmp_path, tmp_path], stripe_bytes=MIB, files=Files(allocate=allocate)
    ) as store:
        with pytest.raises(OffloadError, match=r"growing .*EIO"):
            store.allocate(4 * MIB)
        assert store.used_bytes == 0
        assert store.allocate(64 * MIB).padded_nbytes == 64 * MIB
        assert store.used_bytes == 64 * MIB


def test_misuse_is_refused_with_the_numbers(tmp_path: Path, arena: Arena) -> None:
    with SpillStore([tmp_path]) as store, SpillStore([tmp_path]) as other:
        extent, strange = store.allocate(2 * PAGE), other.allocate(2 * PAGE)
        view = arena.block(4 * PAGE).view
        for offset, buffer, told in (
            (0, view[: PAGE + 1], "4097 bytes at 0 cannot be moved directly"),
            (512, view[:PAGE], "4096 bytes at 512 cannot be moved directly"),
            (-PAGE, view[:PAGE], "4096 bytes at -4096 cannot"),
            (0, view[:0], "0 bytes at 0 cannot"),
            (PAGE, view[: 2 * PAGE], "8192 bytes at 4096 do not lie in an extent of 8192"),
            (0, view[512 : 512 + PAGE], "multiple of 4096, as blocks of the arena do"),
        ):
            with pytest.raises(OffloadError, match=told):
                store.write(extent, offset, buffer)
        with pytest.raises(OffloadError, match="not allocated here"):
            store.read(strange, 0, view[:PAGE])
        with pytest.raises(OffloadError, match="release each one once"):
            store.release(strange)
        store.release(extent)
        with pytest.raises(OffloadError, match="release each one once"):
            store.release(extent)
        with pytest.raises(OffloadError, match="was released"):
            store.read(extent, 0, view[:PAGE])
        with pytest.raises(OffloadError, match="an extent of 0 bytes"):
            store.allocate(0)
    with pytest.raises(OffloadError, match="none was named"):
        SpillStore([])
    with pytest.raises(OffloadError, match="stripe_bytes=5000"):
        SpillStore([tmp_path], stripe_bytes=5000)


# -- fork ------------------------------------------------------------------------------------------


@linux
def test_a_forked_child_is_told_and_its_parent_goes_on(tmp_path: Path, arena: Arena) -> None:
    with SpillStore([tmp_path]) as store:
        extent, view, back = store.allocate(8 * MIB), filled(arena, 8 * MIB), arena.block(8 * MIB)
        begun, stop = threading.Event(), threading.Event()
        rounds = [0]
        wrong: list[int] = []

        def work() -> None:
            while not stop.is_set():
                store.write(extent, 0, view)
                store.read(extent, 0, back.view)
                rounds[0] += 1
                begun.set()
                if back.view != view:
                    wrong.append(rounds[0])

        thread = threading.Thread(target=work)
        thread.start()
        begun.wait()
        try:
            for _ in range(10):
                child = os.fork()
                if not child:
                    os._exit(child_of(store, extent, view))
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        finally:
            stop.set()
            thread.join()
        assert not wrong


def test_a_fork_waits_for_what_runs_and_holds_back_what_comes(tmp_path: Path, arena: Arena) -> None:
    entered, finish = threading.Event(), threading.Event()
    calls: list[str] = []

    def pwritev(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        entered.set()
        finish.wait()
        calls.append("written")
        return os.pwritev(descriptor, buffers, offset)

    with SpillStore([tmp_path], files=Files(pwritev=pwritev)) as store:
        extent, view = store.allocate(PAGE), filled(arena, PAGE)

        def fork() -> None:
            store.before_fork()
            calls.append("forked")
            store.after_fork(in_child=False)

        first = threading.Thread(target=store.write, args=(extent, 0, view))
        forking = threading.Thread(target=fork)
        first.start()
        entered.wait()
        forking.start()
        forking.join(0.05)
        assert forking.is_alive()
        finish.set()
        first.join()
        forking.join()
        assert calls == ["written", "forked"]
        store.before_fork()
        second = threading.Thread(target=store.write, args=(extent, 0, view))
        second.start()
        second.join(0.05)
        assert calls == ["written", "forked"]
        store.after_fork(in_child=False)
        second.join()
        assert calls == ["written", "forked", "written"]


def child_of(store: SpillStore, extent: Extent, view: memoryview) -> int:
    """0 when a child is refused, can let go of what it inherited, and holds no file open."""
    for use in (lambda: store.allocate(1), lambda: store.read(extent, 0, view)):
        try:
            use()
        except OffloadError as error:
            if f"used in {os.getpid()}, forked from" not in str(error):
                return 2
        else:
            return 3
    if descriptors(store.directories[0]):
        return 4
    store.release(extent)
    store.close()
    return 0


# -- directories -----------------------------------------------------------------------------------


def test_a_directory_on_a_disk_will_do(tmp_path: Path) -> None:
    check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert 0 < free_bytes(tmp_path) <= os.statvfs(tmp_path).f_blocks * PAGE


def test_missing_and_wrong_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, told in (
        ("missing", "does not exist: create it, or name a directory"),
        ("file", "is not a directory"),
        ("file/below", r"cannot be used \(Not a directory\)"),
    ):
        with pytest.raises(OffloadError, match=f"{tmp_path}/{name} {told}"):
            check_directory(tmp_path / name)
    with pytest.raises(OffloadError, match=r"free space of .*missing cannot be read"):
        free_bytes(tmp_path / "missing")


@linux
def test_memory_is_refused_as_a_slow_tier() -> None:
    if filesystem_type("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    for use in (check_directory, lambda path: SpillStore([path])):
        with pytest.raises(OffloadError, match="/dev/shm is on tmpfs, which keeps files in RAM"):
            use("/dev/shm")


@linux
def test_a_read_only_place_is_refused() -> None:
    # even root writes nothing here
    with pytest.raises(OffloadError, match=r"/proc/self is not writable \(.+\): make it so"):
        check_directory("/proc/self")


@unprivileged
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OffloadError, match="not writable"):
        check_directory(tmp_path)


@pytest.mark.parametrize(("mode", "fine"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_what_others_own_and_anyone_may_change_is_refused(
    tmp_path: Path, mode: int, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    check_directory(tmp_path)  # ours: we know what we do
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if fine:
        check_directory(tmp_path)
    else:
        with pytest.raises(OffloadError, match=r"belongs to another user .*chmod \+t"):
            check_directory(tmp_path)


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    inner = tmp_path / "a b"
    inner.mkdir()
    (tmp_path / "link").symlink_to(inner)
    named = str(inner).replace(" ", r"\040")
    mounts.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        f"28 27 0:30 / {named} rw shared:4 - xfs /dev/vdb rw\n"
        f"29 28 0:31 / {named} rw - tmpfs tmpfs rw\n"
        f"30 27 0:32 / {tmp_path}/a rw - btrfs /dev/vdc rw\n"
    )
    assert filesystem_type(tmp_path, mounts) == "ext4"
    assert filesystem_type(inner / "deeper", mounts) == "tmpfs"
    assert filesystem_type(tmp_path / "link", mounts) == "tmpfs"
    assert filesystem_type(tmp_path, tmp_path / "none") is None


def test_the_default_directory_is_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    monkeypatch.setattr(directories, "check_directory", refusing(tmp_path / "missing"))
    assert default_directory() == Path("/var/tmp")
    monkeypatch.setattr(directories, "check_directory", refusing(tmp_path, Path("/var/tmp")))
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(OffloadError, match=f"no default .*{tmp_path} refused; /var/tmp refused"):
        default_directory()


def refusing(*refused: Path) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        if path in refused:
            raise OffloadError(f"{path} refused")

    return check


@linux
def test_measuring_a_disk_gives_rates_and_leaves_nothing(tmp_path: Path) -> None:
    before = descriptors()
    speed = measure_disk(tmp_path, seconds=0.01)
    assert all(figure > 0 for figure in speed)
    # between a slow disk and what memory itself can do
    assert 1 < speed.read_bytes_per_us < 1e5
    assert 1 < speed.write_bytes_per_us < 1e5
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OffloadError, match="seconds=0"):
        measure_disk(tmp_path, seconds=0)
    with pytest.raises(OffloadError, match="does not exist"):
        measure_disk(tmp_path / "missing")


def test_a_mapping_opens_only_what_it_is_told() -> None:
    mapping = Mapping(5 * MIB + 1)
    assert mapping.nbytes % PAGE == 0
    assert mapping.address % (2 * MIB) == 0
    mapping.open(0, PAGE)
    mapping.view(0, PAGE)[:] = bytes([1]) * PAGE
    assert mapping.view(0, 2).tobytes() == b"\1\1"
