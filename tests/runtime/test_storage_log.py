"""The spill file as a log: what a step writes goes up the file, and parts go in one call."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_file import Files, part_of
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("on_a_disk")

MIB = 1 << 20
PAGE = 4096
CAPACITY_PAGES = 512


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.lists(st.integers(1, 32), min_size=1, max_size=20),
    late=st.sets(st.integers(0, 19), max_size=3),
    steps=st.integers(2, 8),
)
def test_offsets_of_a_step_ascend(
    tmp_path: Path, sizes: list[int], late: set[int], steps: int
) -> None:
    """Each step sends out the same; backward takes it back last first, some only a step later."""
    while sum(sizes) > CAPACITY_PAGES // 3:
        sizes = sizes[:-1]
    with SpillStore([tmp_path], capacity_bytes=CAPACITY_PAGES * PAGE, reserve_bytes=0) as store:
        old: list[Extent] = []
        for _ in range(steps):
            out = [store.allocate(pages * PAGE) for pages in sizes]
            starts = [piece.offset for extent in out for piece in extent.pieces]
            descents = sum(b < a for a, b in itertools.pairwise(starts))
            # once around the end of the file at most
            assert descents <= 1
            for extent in old:
                store.release(extent)
            old = [extent for i, extent in enumerate(out) if i in late]
            for extent in reversed([e for i, e in enumerate(out) if i not in late]):
                store.release(extent)
        for extent in old:
            store.release(extent)
        assert store.used_bytes == 0


def test_parts_are_written_in_one_call_and_lie_one_behind_the_other(tmp_path: Path) -> None:
    calls: list[int] = []

    def pwritev(fd: int, views: Sequence[memoryview], offset: int) -> int:
        calls.append(len(views))
        # a page less than asked for: what is left comes in a second call
        if len(calls) == 2:
            views = part_of(views, 0, sum(map(len, views)) - PAGE)
        return os.pwritev(fd, views, offset)

    arena = Arena(4 * MIB)
    first, middle, last = (arena.block(size) for size in (PAGE, MIB, 2 * PAGE))
    blocks = (first, middle, last)
    for seed, block in enumerate(blocks):
        values = np.frombuffer(block.view, np.uint8)
        values[:] = np.random.default_rng(seed).integers(0, 256, len(values), np.uint8)
    with SpillStore([tmp_path], files=Files(pwritev=pwritev)) as store:
        extent = store.allocate(MIB + 3 * PAGE)
        calls.append(0)
        store.write_parts(extent, 0, [block.view for block in blocks])
        assert calls == [0, 3, 1]
        back = arena.block(extent.nbytes)
        store.read(extent, 0, back.view)
        assert bytes(back.view) == b"".join(bytes(block.view) for block in blocks)


@given(st.lists(st.binary(max_size=9), max_size=5), st.integers(0, 40), st.integers(0, 40))
def test_a_part_of_many_is_that_of_all_in_one(texts: list[bytes], start: int, size: int) -> None:
    parts = part_of([memoryview(text) for text in texts], start, size)
    assert b"".join(parts) == b"".join(texts)[start : start + size]
    assert all(len(part) for part in parts)


def test_parts_that_are_no_pages_are_refused(tmp_path: Path) -> None:
    arena = Arena(MIB)
    with SpillStore([tmp_path]) as store:
        extent = store.allocate(2 * PAGE)
        view = arena.block(2 * PAGE).view
        with pytest.raises(OffloadError, match=r"a buffer of 100 bytes .* whole pages"):
            store.write_parts(extent, 0, [view[:100], view[: 2 * PAGE - 100]])
        with pytest.raises(OffloadError, match="multiples of 4096"):
            store.write_parts(extent, 0, [])
        assert store.bytes_written == 0
