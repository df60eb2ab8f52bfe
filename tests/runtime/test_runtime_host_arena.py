"""Blocks of pinned host memory: sizes, places, segments, and who holds what for how long."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from host_fakes import FakeRegistrar, arena_of, isolate
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory import pinning
from offcompile.runtime.memory.blocks import MemoryBlock
from offcompile.runtime.memory.host_arena import ALIGN_BYTES, HostArena, HostFull

KIB, MIB = 1 << 10, 1 << 20
PAGE = 4096
#: other memory that may come and go in a process of many tests: threads, small pages made huge
SLACK_BYTES = 16 * MIB

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    isolate(monkeypatch)
    yield
    pinning.sweep()


def ranges_of(blocks: list[MemoryBlock]) -> list[tuple[int, int]]:
    return sorted((block.address, block.address + block.padded_nbytes) for block in blocks)


# -- blocks ------------------------------------------------------------------------------------


def test_blocks_have_exact_sizes_and_do_not_overlap() -> None:
    arena = arena_of(ready_bytes=64 * KIB)
    blocks = [arena.block(n) for n in (1, 256, 257, 0, 5000)]
    assert [block.nbytes for block in blocks] == [1, 256, 257, 0, 5000]
    assert [block.padded_nbytes for block in blocks] == [256, 256, 512, 256, 5120]
    assert all(block.address % ALIGN_BYTES == 0 and block.pinned for block in blocks)
    found = ranges_of(blocks)
    assert all(end <= start for (_, end), (start, _) in pairwise(found))
    for value, block in enumerate(blocks, start=1):
        np.frombuffer(block.view, np.uint8)[:] = value
    for value, block in enumerate(blocks, start=1):
        tensor = block.tensor
        assert (tensor.dtype, tensor.device.type) == (torch.uint8, "cpu")
        assert tensor.tolist() == [value] * block.nbytes
        assert tensor.untyped_storage().nbytes() == block.nbytes
        assert not block.nbytes or tensor.data_ptr() == block.address
    assert arena.used_bytes == arena.peak_bytes == 6400


def test_blocks_for_direct_io_are_whole_pages_and_waste_nothing() -> None:
    arena = arena_of(ready_bytes=16 * PAGE)
    small = arena.block(300)
    paged = arena.block(PAGE + 1, align_bytes=PAGE)
    assert paged.address % PAGE == 0
    assert (paged.padded_nbytes, len(paged.view)) == (2 * PAGE, 2 * PAGE)
    # small blocks still get the bytes before the page boundary
    between = arena.block(PAGE - 512)
    assert between.address == small.address + 512
    assert between.address + between.padded_nbytes == paged.address


def test_what_cannot_be_is_refused_by_name() -> None:
    arena = arena_of()
    with pytest.raises(OffloadError, match="a block of -1 bytes is not possible"):
        arena.block(-1)
    for align in (0, 3, 384, 8192):
        with pytest.raises(OffloadError, match=f"align_bytes={align} is not possible"):
            arena.block(1, align_bytes=align)
    with pytest.raises(OffloadError, match="limit_bytes=-1"):
        HostArena(-1)
    with pytest.raises(OffloadError, match="ready_bytes=-2"):
        HostArena(1, -2)
    with pytest.raises(OffloadError, match="threads=0"):
        HostArena(1, 0, FakeRegistrar(), threads=0)


def test_free_gives_back_once_and_ends_the_block() -> None:
    arena = arena_of(ready_bytes=8 * PAGE)
    block = arena.block(PAGE)
    address = block.address
    block.free()
    block.free()
    assert arena.used_bytes == 0
    for use in ("tensor", "view"):
        with pytest.raises(OffloadError, match=f"block of {PAGE} bytes was used after free"):
            getattr(block, use)
    assert arena.block(8 * PAGE).address == address


def test_a_freed_block_is_not_handed_out_while_a_tensor_lives() -> None:
    arena = arena_of(limit_bytes=2 * PAGE, ready_bytes=2 * PAGE)
    block = arena.block(PAGE)
    tensor = block.tensor.fill_(3)
    block.free()
    other = arena.block(PAGE)
    assert other.address != block.address
    other.tensor.fill_(9)
    assert tensor.tolist() == [3] * PAGE
    with pytest.raises(HostFull):
        arena.block(PAGE)
    del tensor
    assert arena.block(PAGE).address == block.address


def aliases_of(tensor: torch.Tensor) -> dict[str, object]:
    storage = tensor.untyped_storage()
    return {
        "dtype view": tensor.view(torch.float32),
        "as_strided": tensor.view(torch.float32).as_strided((2, 3), (3, 1), 4),
        "slice": tensor[5:9],
        "storage": storage,
        "set_": torch.empty(0, dtype=torch.uint8).set_(storage),
        "numpy slice": tensor.numpy()[3:4],
    }


@pytest.mark.parametrize("kept", list(aliases_of(torch.zeros(64, dtype=torch.uint8))))
def test_the_last_tensor_gives_a_dropped_block_back(kept: str) -> None:
    arena = arena_of(ready_bytes=4 * PAGE)
    alias = aliases_of(arena.block(PAGE).tensor).pop(kept)
    assert arena.used_bytes == PAGE
    del alias
    assert arena.used_bytes == 0


def test_autograd_that_saves_a_view_keeps_the_block_until_backward() -> None:
    arena = arena_of(ready_bytes=PAGE)
    saved = arena.block(16).tensor.view(torch.float32).fill_(2.0)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * saved).sum()
    del saved
    assert arena.used_bytes == 256
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4
    assert arena.used_bytes == 0


# -- segments ----------------------------------------------------------------------------------


@linux
def test_ready_bytes_are_one_touched_and_registered_segment() -> None:
    before = memory.resident().anon_bytes
    registrar = FakeRegistrar()
    arena = HostArena(64 * MIB, 48 * MIB, registrar, threads=3)
    assert registrar.asked == [48 * MIB]
    assert arena.capacity_bytes == 48 * MIB
    assert abs(memory.resident().anon_bytes - before - 48 * MIB) < SLACK_BYTES
    arena.block(48 * MIB)
    assert registrar.asked == [48 * MIB]
    arena.close()
    assert memory.resident().anon_bytes - before < SLACK_BYTES


def test_it_grows_by_segments_cut_to_the_limit_and_blocks_never_span_two() -> None:
    registrar = FakeRegistrar()
    arena = HostArena(4 * MIB + 512, 0, registrar)
    assert arena.capacity_bytes == 0
    blocks = [arena.block(700 * KIB), arena.block(700 * KIB), arena.block(2 * MIB)]
    assert registrar.asked == [MIB, MIB, 2 * MIB]
    blocks.append(arena.block(400))
    assert arena.capacity_bytes == 4 * MIB
    # left are two gaps of 324 KiB and less, never one of both; and 512 bytes of the limit
    with pytest.raises(HostFull, match=f"at most {324 * KIB} in one piece, and 512 more"):
        arena.block(400 * KIB)
    blocks.append(arena.block(324 * KIB))
    blocks.append(arena.block(323 * KIB))
    blocks.append(arena.block(512))
    assert arena.capacity_bytes == 4 * MIB
    blocks.append(arena.block(512))
    assert registrar.asked[3:] == [PAGE]
    with pytest.raises(HostFull, match=f"of {4 * MIB + 512} bytes .* and 0 more can be had"):
        arena.block(2 * KIB)
    for block in blocks:
        inside = [
            start <= block.address and block.address + block.padded_nbytes <= start + size
            for start, size in registrar.held.items()
        ]
        assert sum(inside) == 1
    assert arena.used_bytes == sum(block.padded_nbytes for block in blocks)
    assert not registrar.wrong


def test_empty_segments_make_room_for_a_larger_one() -> None:
    registrar = FakeRegistrar()
    arena = HostArena(4 * MIB, 0, registrar)
    blocks = [arena.block(MIB) for _ in range(4)]
    kept = blocks[0].tensor.fill_(7)
    del blocks
    assert arena.used_bytes == MIB
    with pytest.raises(HostFull, match=f"{4 * MIB} bytes were asked for; of {4 * MIB} bytes"):
        arena.block(4 * MIB)
    assert len(registrar.held) == 4  # nothing was given up in vain
    large = arena.block(3 * MIB)
    assert sorted(registrar.held.values()) == [MIB, 3 * MIB]
    large.tensor.fill_(1)
    assert kept.tolist() == [7] * MIB
    assert arena.capacity_bytes == 4 * MIB
    assert not registrar.wrong


def test_a_block_freed_while_the_arena_grows_is_found_where_it_lies() -> None:
    class FreesMeanwhile(FakeRegistrar):
        """Frees a block and settles it, as another thread does while the arena grows."""

        def register(self, address: int, nbytes: int) -> int:
            if freed:
                freed.pop().free()
                assert arena.used_bytes == MIB // 2
            return super().register(address, nbytes)

    freed: list[MemoryBlock] = []
    registrar = FreesMeanwhile()
    arena = HostArena(8 * MIB, 0, registrar)
    kept = arena.block(MIB // 2)
    freed.append(arena.block(MIB // 2))
    old_end = kept.address + MIB
    kept.tensor.fill_(7)
    block = arena.block(MIB // 2)
    assert len(registrar.held) == 2
    # the old segment has the tightest free range; its memory is not the new one's
    assert block.address == kept.address + MIB // 2 and block.address < old_end
    block.tensor.fill_(1)
    others = [arena.block(MIB // 2) for _ in range(2)]
    for other in others:
        other.tensor.fill_(2)
    assert block.tensor.tolist() == [1] * (MIB // 2)
    assert kept.tensor.tolist() == [7] * (MIB // 2)
    assert arena.capacity_bytes == arena.used_bytes == 2 * MIB


def test_a_ready_arena_beyond_its_limit_is_refused() -> None:
    with pytest.raises(HostFull, match="8192 bytes were asked for; of 0 bytes 0 are free"):
        arena_of(limit_bytes=PAGE, ready_bytes=2 * PAGE)


def test_an_arena_may_be_ready_up_to_a_limit_of_odd_size() -> None:
    arena = arena_of(limit_bytes=2 * PAGE + 200, ready_bytes=2 * PAGE + 200)
    assert arena.capacity_bytes == 2 * PAGE
    assert arena.block(2 * PAGE).padded_nbytes == 2 * PAGE
    # 256 bytes are the least that can be handed out
    with pytest.raises(HostFull, match="200 bytes were asked for; of 0 bytes 0 are free"):
        arena_of(limit_bytes=200, ready_bytes=200)


# -- lifetime ----------------------------------------------------------------------------------


def test_tensors_outlive_the_block_and_the_arena_and_stay_registered() -> None:
    registrar = FakeRegistrar()
    arena = HostArena(8 * MIB, 0, registrar)
    tensor = arena.block(MIB).tensor.fill_(5)
    gone = arena.block(MIB)
    gone.free()
    arena.close()
    assert list(registrar.held) == [tensor.data_ptr()]
    assert pinning.is_registered(tensor.data_ptr(), MIB)
    with pytest.raises(OffloadError, match="the host arena is closed"):
        arena.block(1)
    del arena
    gc.collect()
    pinning.sweep()
    assert tensor.tolist() == [5] * MIB
    address = tensor.data_ptr()
    del tensor
    pinning.sweep()
    assert not registrar.held
    assert not pinning.is_registered(address, 1)
    assert not registrar.wrong


def test_close_twice_unregisters_what_has_died_between() -> None:
    registrar = FakeRegistrar()
    arena = HostArena(8 * MIB, MIB, registrar)
    block = arena.block(1)
    arena.close()
    assert len(registrar.held) == 1
    assert arena.used_bytes == 256
    block.free()
    arena.close()
    assert not registrar.held
    assert (arena.used_bytes, arena.capacity_bytes) == (0, 0)


def test_an_arena_that_was_never_closed_is_swept_by_the_next_one() -> None:
    registrar = FakeRegistrar()
    HostArena(8 * MIB, MIB, registrar)
    gc.collect()
    assert len(registrar.held) == 1
    other = arena_of(ready_bytes=PAGE)
    assert not registrar.held
    assert other.capacity_bytes == PAGE


@linux
def test_many_cycles_leak_nothing() -> None:
    def cycle() -> None:
        registrar = FakeRegistrar()
        arena = HostArena(32 * MIB, 0, registrar)
        held = [arena.block((i % 7 + 1) * 100_000).tensor for i in range(20)]
        del held
        arena.close()
        assert not registrar.held and not registrar.wrong

    for _ in range(3):
        cycle()
    before = memory.resident().anon_bytes
    for _ in range(30):
        cycle()
    assert memory.resident().anon_bytes - before < SLACK_BYTES
    assert not pinning._table.dead


# -- against a model ---------------------------------------------------------------------------


class Naive:
    """Units of 256 bytes in one segment, as a list of booleans."""

    def __init__(self, units: int) -> None:
        self.free = [True] * units

    def best(self, units: int, multiple: int) -> int | None:
        """Where best fit puts `units` at a multiple of `multiple`."""
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(self.free):
            end = at
            while end < len(self.free) and self.free[end]:
                end += 1
            begin = -(-at // multiple) * multiple
            if begin + units <= end:
                found.append((end - at, begin))
            at = max(end, at + 1)
        return min(found)[1] if found else None

    def mark(self, at: int, units: int, free: bool) -> None:
        assert all(self.free[i] is not free for i in range(at, at + units))
        self.free[at : at + units] = [free] * units


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "take", "paged", "free", "drop"]), st.integers(0, 9000)),
    max_size=50,
)


def follow(steps: list[tuple[str, int]], arena: HostArena, naive: Naive, base: int) -> None:
    live: list[tuple[MemoryBlock, int, int]] = []
    for what, number in steps:
        if what in ("take", "paged"):
            align = PAGE if what == "paged" else 256
            size = -(-max(number, 1) // align) * align // 256
            expected = naive.best(size, align // 256)
            if expected is None:
                with pytest.raises(HostFull, match=f"full: {number} bytes were asked for"):
                    arena.block(number, align)
            else:
                block = arena.block(number, align)
                assert block.address == base + 256 * expected
                naive.mark(expected, size, False)
                live.append((block, expected, size))
                del block
        elif live:
            block, at, size = live.pop(number % len(live))
            if what == "free":
                block.free()
            del block
            naive.mark(at, size, True)
        assert arena.used_bytes == 256 * naive.free.count(False)


@given(STEPS)
def test_it_does_what_a_naive_model_does(steps: list[tuple[str, int]]) -> None:
    units = 128
    registrar = FakeRegistrar()
    arena = HostArena(units * 256, units * 256, registrar)
    (base,) = registrar.held
    follow(steps, arena, Naive(units), base)
    # no fragmentation once everything is back
    assert arena.block(units * 256).address == base
    arena.close()
    assert not registrar.held and not registrar.wrong


# -- threads and garbage -----------------------------------------------------------------------


def test_threads_never_share_a_block() -> None:
    registrar = FakeRegistrar()
    arena = HostArena(16 * MIB, 0, registrar)
    wrong: list[int] = []

    def work(value: int) -> None:
        for turn in range(100):
            block = arena.block((turn % 9 + 1) * 30_000)
            tensor = block.tensor.fill_(value)
            block.free()
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert arena.used_bytes == 0
    arena.close()
    assert not registrar.held and not registrar.wrong


def test_a_block_in_a_cycle_of_garbage_may_die_inside_of_the_arena() -> None:
    arena = arena_of(ready_bytes=64 * PAGE)
    before = gc.get_threshold()
    gc.set_threshold(1)  # collects at nearly every allocation, those under the lock included
    try:
        for _ in range(200):
            knot: list[object] = [arena.block(PAGE).tensor]
            knot.append(knot)
            del knot
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert arena.used_bytes == 0


def test_a_cycle_of_garbage_may_hold_the_arena_itself() -> None:
    registrar = FakeRegistrar()
    for _ in range(5):
        arena = HostArena(8 * MIB, PAGE, registrar)
        knot: list[object] = [arena, arena.block(100)]
        knot.append(knot)
        del knot, arena
    gc.collect()
    pinning.sweep()
    assert not registrar.held and not registrar.wrong
