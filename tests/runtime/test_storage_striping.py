"""Several directories: stripes by speed, side by side, and none waits for another."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.base import once
from offcompile.runtime.base.threads import TaskQueue, side_by_side
from offcompile.runtime.disk import spill, striping
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.disk.striping import Turns, shares, stripe_of
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")

MIB = 1 << 20
PAGE = 4096


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for place in made:
        place.mkdir()
    return made


def bytes_by_file(extents: Sequence[Extent]) -> dict[int, int]:
    found: dict[int, int] = {}
    for extent in extents:
        for piece in extent.pieces:
            found[piece.file] = found.get(piece.file, 0) + piece.nbytes
    return found


@given(
    st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5),
    st.lists(st.integers(1, 8), min_size=100, max_size=300),
)
def test_everyone_gets_a_share_by_weight(weights: list[float], sizes: list[int]) -> None:
    turns = Turns(weights)
    given_pages = [0] * len(weights)
    for size in sizes:
        first, *_ = turns.order(size)
        turns.took(first, size)
        given_pages[first] += size
    # nobody is further off than by what two turns of the largest are
    for got, weight in zip(given_pages, weights, strict=True):
        due = sum(given_pages) * weight / sum(weights)
        assert abs(got - due) <= len(weights) * max(sizes)


def test_who_had_no_room_makes_nothing_up_later() -> None:
    turns = Turns([1.0, 1.0])
    for _ in range(100):
        turns.took(1, 10)
    taken = []
    for _ in range(6):
        first, *_ = turns.order(10)
        turns.took(first, 10)
        taken.append(first)
    assert taken.count(0) <= 4  # a turn or two, not a hundred


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [float("inf")], [float("nan")], [-1.0]])
def test_weights_that_mean_nothing_are_refused(weights: list[float]) -> None:
    with pytest.raises(OffloadError, match="give positive numbers"):
        Turns(weights)


def test_a_store_wants_one_weight_for_each_directory(places: list[Path]) -> None:
    with pytest.raises(OffloadError, match="1 weights for 2 directories"):
        SpillStore(places, weights=[1.0])


def test_stripes_are_parts_of_the_extent_within_bounds() -> None:
    assert stripe_of(100 * MIB, 1, 8 * MIB) == 100 * MIB
    assert stripe_of(6 * MIB, 2, 8 * MIB) == MIB
    assert stripe_of(32 * MIB, 2, 8 * MIB) == 4 * MIB
    assert stripe_of(999 * MIB, 2, 8 * MIB) == 8 * MIB
    assert stripe_of(999 * MIB, 2, 4 * PAGE) == 4 * PAGE
    assert stripe_of(24 * MIB + PAGE, 3, 8 * MIB) % PAGE == 0


def test_bytes_go_where_they_are_taken_faster_and_come_back(places: list[Path]) -> None:
    arena = Arena(16 * MIB)
    data = arena.block(8 * MIB).view
    np.frombuffer(data, np.uint8)[:] = np.random.default_rng(0).integers(0, 256, 8 * MIB, np.uint8)
    with SpillStore(places, weights=[3.0, 1.0]) as store:
        extents = [store.allocate(8 * MIB) for _ in range(8)]
        taken = bytes_by_file(extents)
        assert abs(taken[0] - 48 * MIB) <= 2 * MIB and sum(taken.values()) == 64 * MIB
        for extent in extents[::3]:
            store.write(extent, 0, data)
        back = arena.block(8 * MIB).view
        store.read(extents[3], 0, back)
        assert back == data


def test_speeds_are_measured_once_a_disk(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_done", {})
    asked: list[Path] = []

    def disk_of(place: str | Path) -> object:
        return type("Stat", (), {"st_dev": 1 if Path(place).name == "b" else 2})()

    def speed(place: Path) -> float:
        asked.append(place)
        return 3000.0 if place.name == "b" else 1000.0

    monkeypatch.setattr(striping.os, "stat", disk_of)
    a, b = places
    assert shares([a, b], speed) == [1000.0, 3000.0]
    assert shares([b, a, b], speed) == [1500.0, 1000.0, 1500.0]
    assert asked == [a, b]


def test_equal_shares_on_one_disk_and_where_nothing_can_be_measured(
    places: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(once, "_done", {})

    def full(place: Path) -> float:
        raise OffloadError("no room")

    assert shares(places, full) == [1.0, 1.0]
    disks = iter(range(10))
    monkeypatch.setattr(
        striping.os, "stat", lambda place: type("Stat", (), {"st_dev": next(disks)})()
    )
    assert shares(places, full) == [1.0, 1.0]


def test_a_real_disk_is_measured(tmp_path: Path) -> None:
    assert spill._stripe_speed(tmp_path) > 0


def test_directories_work_at_the_same_time(places: list[Path]) -> None:
    """Neither returns before both have begun: one after the other, they would wait for ever."""
    import os

    both = threading.Barrier(2, timeout=300)

    def preadv(fd: int, views: Sequence[memoryview], offset: int) -> int:
        both.wait()
        return os.preadv(fd, views, offset)

    arena = Arena(4 * MIB)
    with SpillStore(places, stripe_bytes=MIB, files=Files(preadv=preadv)) as store:
        extent = store.allocate(2 * MIB)
        assert len(bytes_by_file([extent])) == 2
        block = arena.block(2 * MIB)
        store.write(extent, 0, block.view)
        store.read(extent, 0, block.view)
        assert store.bytes_read == 2 * MIB


def test_an_error_in_one_directory_is_raised_when_the_others_are_done(places: list[Path]) -> None:
    import os

    done = []

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        if len(views[0]) == PAGE:  # the try for direct I/O
            return os.pwritev(fd, views, offset)
        if not done:
            done.append("failed")
            raise OSError(5, "Input/output error")
        done.append("written")
        return os.pwritev(fd, views, offset)

    arena = Arena(4 * MIB)
    with SpillStore(places, stripe_bytes=MIB, files=Files(pwritev=pwritev)) as store:
        extent = store.allocate(2 * MIB)
        with pytest.raises(OffloadError, match="EIO"):
            store.write(extent, 0, arena.block(2 * MIB).view)
        assert done == ["failed", "written"]
        assert store.bytes_written == MIB
        store.release(extent)
        assert store.used_bytes == 0


def test_tasks_of_a_queue_run_in_order_and_after_closing_on_the_caller() -> None:
    queue, seen = TaskQueue("test-queue"), []
    other = TaskQueue("test-other")
    works = [lambda i=i: seen.append((i, threading.current_thread().name)) for i in range(3)]
    side_by_side([(queue, works), (other, [lambda: None])])
    assert seen == [(i, "test-queue") for i in range(3)]
    queue.close()
    side_by_side([(queue, works[:1]), (other, [lambda: None])])
    assert seen[-1] == (0, threading.current_thread().name)
    other.close()
    side_by_side([])
