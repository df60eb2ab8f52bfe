"""Spill files on a disk that fails, is full or moves less than asked; and misuse, refused."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from spill_files import filled

from offcompile.ir import OffloadError
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")
MIB = 1 << 20
PAGE = 4096


@pytest.fixture(scope="module")
def arena() -> Arena:
    return Arena(40 * MIB)


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
