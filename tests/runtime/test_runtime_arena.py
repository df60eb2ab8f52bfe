"""The arena: who holds a block and when it comes back; overflow; growth; free ranges by a model."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import warm
from hypothesis import given
from hypothesis import strategies as st

from offcompile.ir import OffloadError
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.disk.extents import FreeRanges
from offcompile.runtime.memory.arena import Arena

MIB = 1 << 20
PAGE = page_multiple(1)
#: other memory that may come and go in a process of many tests: threads, small pages made huge
SLACK_BYTES = 16 * MIB

linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def test_blocks_are_pages_that_do_not_overlap() -> None:
    arena = Arena(8 * PAGE)
    blocks = [arena.block(n) for n in (1, PAGE, PAGE + 1, 0)]
    starts = [block.tensor.data_ptr() for block in blocks]
    assert all(start % PAGE_BYTES == 0 for start in starts)
    assert [block.nbytes for block in blocks] == [1, PAGE, PAGE + 1, 0]
    assert [block.padded_nbytes for block in blocks] == [PAGE, PAGE, 2 * PAGE, PAGE]
    assert [len(block.view) for block in blocks] == [block.padded_nbytes for block in blocks]
    for value, block in enumerate(blocks, start=1):
        np.frombuffer(block.view, np.uint8)[:] = value
    for value, block in enumerate(blocks, start=1):
        tensor = block.tensor
        assert tensor.dtype == torch.uint8
        assert tensor.untyped_storage().nbytes() == block.nbytes
        assert tensor.tolist() == [value] * block.nbytes
    assert arena.used_bytes == 5 * PAGE
    assert arena.peak_bytes == 5 * PAGE
    assert arena.overflow_bytes == 0


def aliases_of(tensor: torch.Tensor) -> dict[str, object]:
    storage = tensor.untyped_storage()
    return {
        "dtype view": tensor.view(torch.float32),
        "as_strided": tensor.view(torch.float32).as_strided((2, 3), (3, 1), 4),
        "slice": tensor[5:9],
        "detached": tensor.detach(),
        "storage": storage,
        "set_": torch.empty(0, dtype=torch.uint8).set_(storage),
        "numpy": tensor.numpy(),
        "numpy slice": tensor.numpy()[3:4],
    }


@pytest.mark.parametrize("kept", list(aliases_of(torch.zeros(64, dtype=torch.uint8))))
def test_any_alias_of_the_storage_keeps_the_block(kept: str) -> None:
    arena = Arena(4 * PAGE)
    alias = aliases_of(arena.block(PAGE).tensor).pop(kept)
    assert arena.used_bytes == PAGE
    other = arena.block(3 * PAGE)
    assert arena.overflow_bytes == 0
    del alias
    assert arena.used_bytes == 3 * PAGE
    del other
    assert arena.used_bytes == 0


def test_the_block_and_its_views_keep_it_too() -> None:
    arena = Arena(4 * PAGE)
    block = arena.block(PAGE)
    view = block.view
    assert block.tensor.numel() == PAGE
    assert arena.used_bytes == PAGE
    del block
    part = view[100:200]
    del view
    assert arena.used_bytes == PAGE
    del part
    assert arena.used_bytes == 0


def test_autograd_that_saves_a_view_keeps_the_block_until_backward() -> None:
    arena = Arena(4 * PAGE)
    saved = arena.block(16).tensor.view(torch.float32).fill_(2.0)
    weight = torch.ones(4, requires_grad=True)
    loss = (weight * saved).sum()
    del saved
    assert arena.used_bytes == PAGE
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 4
    assert arena.used_bytes == 0


def test_blocks_outlive_the_arena() -> None:
    arena = Arena(2 * PAGE)
    tensor = arena.block(PAGE).tensor.fill_(7)
    overflow = arena.block(4 * PAGE).tensor.fill_(8)
    del arena
    gc.collect()
    assert tensor.tolist() == [7] * PAGE
    assert overflow.tolist() == [8] * 4 * PAGE


def test_neighbours_that_come_back_make_one_range_again() -> None:
    arena = Arena(6 * PAGE)
    blocks = [arena.block(PAGE) for _ in range(6)]
    first = blocks[0].tensor.data_ptr()
    del blocks[5], blocks[3], blocks[1], blocks[2], blocks[1], blocks[0]
    assert arena.used_bytes == 0
    assert arena.block(6 * PAGE).tensor.data_ptr() == first
    assert arena.overflow_bytes == 0


def test_the_smallest_gap_that_fits_is_taken() -> None:
    arena = Arena(9 * PAGE)
    blocks = [arena.block(n * PAGE) for n in (3, 1, 2, 1, 2)]
    starts = [block.tensor.data_ptr() for block in blocks]
    del blocks[0], blocks[1]  # gaps of 3 and 2
    assert arena.block(2 * PAGE).tensor.data_ptr() == starts[2]


@linux
def test_what_does_not_fit_is_mapped_apart_and_goes_back_to_the_system() -> None:
    arena = Arena(4 * PAGE)
    before = memory.resident().anon_bytes
    block = arena.block(64 * MIB + 5)
    tensor = block.tensor.fill_(1)
    del block
    assert arena.overflow_bytes == 64 * MIB + PAGE
    assert arena.used_bytes == 0
    assert arena.peak_bytes == 64 * MIB + PAGE
    assert abs(memory.resident().anon_bytes - before - 64 * MIB) < SLACK_BYTES
    del tensor
    assert abs(memory.resident().anon_bytes - before) < SLACK_BYTES
    assert arena.overflow_bytes == 0
    arena.reset_peak()
    assert arena.peak_bytes == 0


@linux
def test_the_arena_is_touched_private_and_given_back_with_its_last_block() -> None:
    resident_before, data_before = memory.resident().anon_bytes, memory.data_bytes()
    arena = Arena(64 * MIB)
    assert abs(memory.resident().anon_bytes - resident_before - 64 * MIB) < SLACK_BYTES
    assert abs(memory.data_bytes() - data_before - 64 * MIB) < SLACK_BYTES
    tensor = arena.block(PAGE).tensor
    del arena
    assert memory.resident().anon_bytes - resident_before > 60 * MIB
    del tensor
    assert abs(memory.resident().anon_bytes - resident_before) < SLACK_BYTES


def test_growing_leaves_blocks_where_they_are_and_joins_the_ends() -> None:
    arena = Arena(2 * PAGE)
    first = arena.block(PAGE).tensor.fill_(5)
    where = first.data_ptr()
    arena.ensure(PAGE)
    assert arena.capacity_bytes == 2 * PAGE
    arena.ensure(5 * PAGE)
    assert arena.capacity_bytes == 5 * PAGE
    # one gap across the old end
    assert arena.block(4 * PAGE).tensor.data_ptr() == where + PAGE
    assert first.data_ptr() == where
    assert first.tolist() == [5] * PAGE


def test_refusals_name_what_was_asked() -> None:
    with pytest.raises(OffloadError, match="an arena of -1 bytes"):
        Arena(-1)
    arena = Arena(0)
    assert arena.capacity_bytes == 0
    with pytest.raises(OffloadError, match="a block of -5 bytes"):
        arena.block(-5)
    beyond = 2 * memory.machine_memory_bytes()
    with pytest.raises(OffloadError, match=f"cannot grow to {beyond} bytes.*lower `memory`"):
        arena.ensure(beyond)
    with pytest.raises(OffloadError, match=r"refused \d+ bytes of addresses"):
        arena.block(1 << 60)
    assert (arena.used_bytes, arena.overflow_bytes, arena.capacity_bytes) == (0, 0, 0)


LIMITED = f"""
import resource
from offcompile.ir import OffloadError
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.base.process_memory import data_bytes
arena = Arena({MIB})
limit = data_bytes() + {64 * MIB}
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
for ask in (arena.ensure, arena.block):
    try:
        ask({256 * MIB})
    except OffloadError as error:
        print(error)
arena.ensure({32 * MIB})
print(arena.capacity_bytes, arena.overflow_bytes, arena.block({32 * MIB}).nbytes)
"""


@linux
def test_a_limit_on_data_binds_the_arena_and_is_an_error_that_leaves_it_whole() -> None:
    told = warm.run([sys.executable, "-c", LIMITED], check=True).stdout.splitlines()
    assert len(told) == 3
    assert f"refused {255 * MIB} bytes of memory (Cannot allocate" in told[0]
    assert f"refused {256 * MIB} bytes of memory (Cannot allocate" in told[1]
    assert "ulimit -d" in told[0]
    assert told[2] == f"{32 * MIB} 0 {32 * MIB}"


@linux
def test_many_cycles_leak_nothing() -> None:
    arena = Arena(4 * MIB)

    def cycle() -> None:
        held = [arena.block((i % 7 + 1) * 100_000).tensor for i in range(20)]
        gone = held[::2]
        del held
        gone.clear()

    for _ in range(20):
        cycle()
    before, descriptors = memory.resident().anon_bytes, len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        cycle()
    assert (arena.used_bytes, arena.overflow_bytes) == (0, 0)
    assert memory.resident().anon_bytes - before < SLACK_BYTES
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert arena.block(arena.capacity_bytes).nbytes == arena.capacity_bytes
    assert arena.overflow_bytes == 0


def test_threads_never_share_a_block() -> None:
    arena = Arena(64 * PAGE)
    wrong: list[int] = []

    def work(value: int) -> None:
        for turn in range(150):
            tensor = arena.block((turn % 9 + 1) * PAGE).tensor.fill_(value)
            if not bool((tensor == value).all()):
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert (arena.used_bytes, arena.overflow_bytes) == (0, 0)


def test_a_block_in_a_cycle_of_garbage_may_die_inside_of_the_arena() -> None:
    arena = Arena(64 * PAGE)
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


def test_a_forked_child_has_a_copy_of_its_own() -> None:
    arena = Arena(16 * PAGE)
    tensor = arena.block(PAGE).tensor.fill_(3)
    running = threading.Event()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            arena.block(2 * PAGE)
            running.set()

    # forks in the middle of another thread's calls, which would leave the lock taken
    thread = threading.Thread(target=work)
    thread.start()
    running.wait()
    try:
        for _ in range(20):
            child = os.fork()
            if not child:
                seen = bytes(tensor.numpy()) == bytes([3]) * PAGE
                tensor.numpy()[:] = 9
                del tensor
                arena.block(4 * PAGE).view[0] = 1
                os._exit(0 if seen and arena.overflow_bytes == 0 else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        stop.set()
        thread.join()
    assert tensor.tolist() == [3] * PAGE
    assert arena.used_bytes == PAGE


def test_interpreters_end_in_peace_while_blocks_live() -> None:
    script = (
        "from offcompile.runtime.memory.arena import Arena\n"
        "import threading, torch\n"
        "arena = Arena(1 << 20)\n"
        "kept = [arena.block(4096).tensor, arena.block(2 << 20).tensor]\n"
        "class Late:\n"
        "    def __del__(self): kept[0][0] = kept[1][0] = 1\n"
        "late = Late()\n"
    )
    done = warm.run([sys.executable, "-c", script])
    assert (done.returncode, done.stderr) == (0, "")


class Naive:
    """Free units as a list of booleans."""

    def __init__(self, size: int) -> None:
        self.free = [True] * size

    def ranges(self) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for at, free in enumerate(self.free):
            if free and found and sum(found[-1]) == at:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            elif free:
                found.append((at, 1))
        return found

    def mark(self, start: int, size: int, free: bool) -> None:
        assert all(self.free[at] is not free for at in range(start, start + size))
        self.free[start : start + size] = [free] * size

    def best(self, size: int) -> int | None:
        fitting = [(n, start) for start, n in self.ranges() if n >= size]
        return min(fitting)[1] if fitting else None

    def next(self, head: int, size: int) -> int | None:
        if head + size <= len(self.free) and all(self.free[head : head + size]):
            return head
        fitting = [start for start, n in self.ranges() if n >= size]
        later = [start for start in fitting if start > head]
        return next(iter([*later, *fitting]), None)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["best", "next", "largest", "give"]),
        st.integers(1, 12),
        st.integers(0, 39),
    ),
    max_size=60,
)


@given(STEPS)
def test_free_ranges_agree_with_a_naive_model(steps: list[tuple[str, int, int]]) -> None:
    naive, ranges = Naive(40), FreeRanges()
    ranges.add(0, 40)
    taken: list[tuple[int, int]] = []
    for what, size, number in steps:
        if what == "give":
            if taken:
                start, size = taken.pop(number % len(taken))
                naive.mark(start, size, True)
                ranges.add(start, size)
                with pytest.raises(ValueError, match="free already"):
                    ranges.add(start, size)
        elif what == "largest":
            largest = max((n for _, n in naive.ranges()), default=0)
            got = ranges.take_largest(size)
            assert (got is None) == (largest == 0)
            if got is not None:
                assert got[1] == min(largest, size)
                naive.mark(*got, False)
                taken.append(got)
        else:
            best = what == "best"
            expected = naive.best(size) if best else naive.next(number, size)
            found = ranges.take_best(size) if best else ranges.take_next(number, size)
            assert found == expected
            if found is not None:
                naive.mark(found, size, False)
                taken.append((found, size))
        assert ranges.ranges() == naive.ranges()
        assert ranges.total == sum(naive.free)
        assert ranges.largest() == max((n for _, n in naive.ranges()), default=0)


def test_few_addresses_are_enough_for_an_arena() -> None:
    # the reservation of addresses is bounded by `ulimit -v`, and the arena still works
    script = (
        "import resource\n"
        "from offcompile.runtime.memory.arena import Arena\n"
        "told = dict(line.split(':', 1) for line in open('/proc/self/status') if ':' in line)\n"
        "room = int(told['VmSize'].split()[0]) * 1024 + (256 << 20)\n"
        "resource.setrlimit(resource.RLIMIT_AS, (room, room))\n"
        "arena = Arena(32 << 20)\n"
        "print(arena.block(32 << 20).nbytes, arena.overflow_bytes)\n"
    )
    if not hasattr(resource, "RLIMIT_AS") or not Path("/proc/self/status").exists():
        pytest.skip("needs Linux")
    told = warm.run([sys.executable, "-c", script], check=True).stdout.split()
    assert told == [str(32 << 20), "0"]
