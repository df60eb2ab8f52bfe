"""Checksums of pages, and stores that hold what comes back against them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cuda_bench import NOTHING, STAGING, Disk, bench_of
from hypothesis import given
from hypothesis import strategies as st
from test_moving_codecs_cuda import expect_half, half_zero

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES as PAGE
from offcompile.runtime.codecs import engine
from offcompile.runtime.codecs.engines import CodecEngine
from offcompile.runtime.codecs.native import Native
from offcompile.runtime.codecs.reference import Reference
from offcompile.runtime.disk.checksums import VerifiedStore
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.memory.blocks import MemoryBlock

linux = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="files of Linux")


def pages(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * PAGE, np.uint8)


@pytest.fixture(scope="module", params=["reference", "native"])
def any_engine(request: pytest.FixtureRequest) -> CodecEngine:
    return Reference() if request.param == "reference" else Native()


# -- sums ------------------------------------------------------------------------------------------


def test_sums_are_those_that_were_worked_out_by_hand(any_engine: CodecEngine) -> None:
    """A page of zeros and one that counts up, word by word with Python's own integers."""

    def by_hand(words: list[int]) -> int:
        factor, most = 0x9E3779B185EBCA87, (1 << 64) - 1

        def stir(x: int) -> int:
            return ((x << 29 | x >> 35) & most) * factor & most

        held = [(2 * lane + 1) * factor & most for lane in range(8)]
        for at, word in enumerate(words):
            held[at % 8] = stir(held[at % 8] ^ word)
        total = 0
        for lane in held:
            total = stir(total ^ lane)
        return total

    both = np.concatenate([np.zeros(512, np.uint64), np.arange(512, dtype=np.uint64)])
    found = any_engine.sum_pages(both.view(np.uint8))
    assert found.tolist() == [by_hand([0] * 512), by_hand(list(range(512)))]


@pytest.mark.parametrize("count", [0, 1, 3, 4, 5, 11])
def test_engines_agree_page_by_page(count: int) -> None:
    many = pages(count, count)
    found = engine().sum_pages(many)
    assert found.dtype == np.uint64 and len(found) == count and (found != 0).all()
    assert found.tolist() == Reference().sum_pages(many).tolist()
    alone = [engine().sum_pages(many[at : at + PAGE])[0] for at in range(0, len(many), PAGE)]
    assert found.tolist() == alone


@given(st.integers(0, 8 * PAGE - 1), st.integers(0, 2**31))
def test_any_flipped_bit_is_seen(bit: int, seed: int) -> None:
    page = pages(1, seed)
    before = engine().sum_pages(page)[0]
    page[bit // 8] ^= 1 << bit % 8
    assert engine().sum_pages(page)[0] != before


@given(st.lists(st.integers(0, 8 * PAGE - 1), min_size=1, max_size=6, unique=True))
def test_several_flipped_bits_are_seen_in_zeros(bits: list[int]) -> None:
    page = np.zeros(PAGE, np.uint8)
    before = engine().sum_pages(page)[0]
    for bit in bits:
        page[bit // 8] ^= 1 << bit % 8
    assert engine().sum_pages(page)[0] != before


@given(st.integers(0, 511), st.integers(0, 511))
def test_words_that_change_places_are_seen(one: int, other: int) -> None:
    words = pages(1).view(np.uint64)
    before = engine().sum_pages(words.view(np.uint8))[0]
    words[[one, other]] = words[[other, one]]
    assert (engine().sum_pages(words.view(np.uint8))[0] == before) == (one == other)


# -- stores ----------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path: Path) -> Iterator[VerifiedStore]:
    places = [tmp_path / name for name in "ab"]
    for place in places:
        place.mkdir()
    with VerifiedStore(places, stripe_bytes=1 << 20, reserve_bytes=0) as made:
        yield made


def block(count: int, seed: int = 0) -> MemoryBlock:
    made = Arena(0).block(count * PAGE)
    made.view[:] = pages(count, seed).data
    return made


def swap(store: VerifiedStore, *places: tuple[int, int, int]) -> None:
    """Rotate what lies in these pages on the disk; of a single one: flip a bit."""
    names = [f"/proc/self/fd/{store.descriptors[file]}" for file, _, _ in places]
    descriptors = [os.open(name, os.O_RDWR) for name in names]
    found = [os.pread(d, PAGE, at) for d, (_, at, _) in zip(descriptors, places, strict=True)]
    found.insert(0, found.pop())
    if len(found) == 1:
        found = [found[0][:-1] + bytes([found[0][-1] ^ 1])]
    for descriptor, (_, at, _), page in zip(descriptors, places, found, strict=True):
        os.pwrite(descriptor, page, at)
        os.fsync(descriptor)
        os.close(descriptor)


def test_what_was_written_in_parts_is_read_in_others(store: VerifiedStore) -> None:
    extent, given, back = store.allocate(700 * PAGE), block(700), block(700, 1)
    store.write_parts(extent, 0, [given.view[: 3 * PAGE], given.view[3 * PAGE : 300 * PAGE]])
    # nothing is known of what was never written
    store.read(extent, 299 * PAGE, back.view[: 2 * PAGE])
    store.write(extent, 300 * PAGE, given.view[300 * PAGE :])
    for start, end in ((0, 700), (1, 2), (299, 301), (650, 700)):
        store.read(extent, start * PAGE, back.view[start * PAGE : end * PAGE])
        assert back.view[start * PAGE : end * PAGE] == given.view[start * PAGE : end * PAGE]
    assert store.sums_bytes == 700 * 8
    store.write(extent, 0, block(700, 2).view)
    store.read(extent, 0, back.view)
    assert back.view == block(700, 2).view
    store.release(extent)
    assert (store.sums_bytes, store.used_bytes) == (0, 0)


@linux
def test_a_changed_page_is_named_and_no_other_is(store: VerifiedStore) -> None:
    extent, given, back = store.allocate(1500 * PAGE), block(1500), block(1500, 1)
    store.write(extent, 0, given.view)
    for number in (0, 700, 1499):
        ((file, at, _),) = place = store.ranges(extent, number * PAGE, PAGE)
        swap(store, *place)
        told = (
            rf"1 of 1500 pages read .* at {at} of the spill file in {store.directories[file]}, "
            rf"{number * PAGE} bytes into what was stored.*Check that disk"
        )
        with pytest.raises(OffloadError, match=told):
            store.read(extent, 0, back.view)
        store.read(extent, 100 * PAGE, back.view[: 500 * PAGE])
        swap(store, *place)
        store.read(extent, 0, back.view)
        assert back.view == given.view


@linux
def test_pages_that_change_places_are_told(store: VerifiedStore) -> None:
    one, other = (store.allocate(4 * PAGE) for _ in range(2))
    store.write(one, 0, block(4).view)
    store.write(other, 0, block(4, 1).view)
    swap(store, *store.ranges(one, PAGE, PAGE), *store.ranges(other, 2 * PAGE, PAGE))
    for extent in (one, other):
        with pytest.raises(OffloadError, match="1 of 4 pages read are not what was written"):
            store.read(extent, 0, block(4).view)


def test_misuse_is_refused_as_by_any_store(store: VerifiedStore) -> None:
    extent = store.allocate(4 * PAGE)
    with pytest.raises(OffloadError, match="cannot be moved directly"):
        store.write(extent, 0, block(1).view[:100])
    with pytest.raises(OffloadError, match="do not lie in an extent"):
        store.write(extent, PAGE, block(4).view)
    store.release(extent)
    with pytest.raises(OffloadError, match="not allocated here"):
        store.write(extent, 0, block(4).view)
    with pytest.raises(OffloadError, match="not allocated here"):
        store.release(extent)


# -- between a GPU and the disk --------------------------------------------------------------------


class VerifiedDisk(Disk, VerifiedStore):
    pass


CHANGED = r"a \(81920 bytes\) could not be loaded from .*pages read are not what was written there"


@linux
@pytest.mark.parametrize("codec", [None, "bitmask"])
def test_on_cuda_a_changed_page_is_told_and_the_next_move_is_fine(
    codec: str | None, tmp_path: Path
) -> None:
    with VerifiedDisk([tmp_path]) as store:
        bench = bench_of(0, {"disk": store})
        bench.codec = codec
        for damaged in (False, True, False):
            ticket = bench.out(half_zero(bench, 5 * STAGING), "a", "disk", "device_to_disk")
            bench.wait_out(ticket)
            bench.settle()
            if damaged:
                (extent,) = store._extents.live.values()
                swap(store, *store.ranges(extent, 0, PAGE))
            buffer, load = bench.load(ticket, "a", "disk_to_device")
            bench.device.drain()
            if damaged:
                with pytest.raises(OffloadError, match=CHANGED):
                    bench.wait_load(load)
            else:
                bench.wait_load(load)
                expect_half(bench, buffer)
                bench.settle()
            del ticket, buffer, load
        found, own = bench.left(), bench.device.staging_bytes
        found = {**found, "device": found["device"] - own}
        found["in_flight_bytes"] -= own
        assert (found, bench.wrong, bench.streams.races) == (NOTHING, [], [])
        assert (store.used_bytes, store.sums_bytes) == (0, 0)
        bench.close()
