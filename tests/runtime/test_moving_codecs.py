"""Moves with a codec on the CPU device: what is written, what comes back, room, faults, ends."""

from __future__ import annotations

import errno
import gc
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.codecs import codec
from offcompile.runtime.device import packing, tickets
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.device.packing import PackedSlot
from offcompile.runtime.disk.directories import default_directory
from offcompile.runtime.disk.spill import SpillFull, SpillStore
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

KIB, MIB = 1 << 10, 1 << 20
PIECE = 64 * KIB  # float32 elements: a quarter of a piece


class Disk:
    """The real calls, counted; from the call `fails_at` on they fail, and a gate holds them."""

    def __init__(self) -> None:
        self.written: list[tuple[int, int]] = []
        self.writes = self.reads = 0
        self.fails_at: int | None = None
        self.gate, self.at_gate = threading.Event(), threading.Event()
        self.gate.set()

    def pwritev(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        self.writes += 1
        self._pass(self.writes)
        self.written.append((offset, sum(len(v) for v in views)))
        return Files().pwritev(descriptor, views, offset)

    def preadv(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        self.reads += 1
        self._pass(self.reads)
        return Files().preadv(descriptor, views, offset)

    def _pass(self, call: int) -> None:
        self.at_gate.set()
        self.gate.wait()
        if self.fails_at is not None and call >= self.fails_at:
            raise OSError(errno.EIO, "Input/output error")


class Bench:
    def __init__(self, **capacities: int | None) -> None:
        self.disk = Disk()
        files = Files(pwritev=self.disk.pwritev, preadv=self.disk.preadv)
        self.stores = {
            tier: SpillStore([default_directory()], capacity, files=files)
            for tier, capacity in (capacities or {"host": None}).items()
        }
        self.device = CpuDevice(Arena(0), self.stores)
        self.mover = Mover(self.device)

    def out(self, x: torch.Tensor, codec: str | None = "bitmask") -> torch.Tensor:
        return self.mover.start_out(x, "x", next(iter(self.stores)), "out", codec)

    def wait_out(self, ticket: torch.Tensor) -> PackedSlot:
        saved = tickets.find(ticket, Saved)
        self.mover.wait_out(saved)
        assert isinstance(saved.slot, PackedSlot)
        return saved.slot

    def back(self, ticket: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        buffer, load = self.mover.start_load(tickets.find(ticket, Saved), "x", "in")
        self.mover.wait_load(tickets.find(load, Load))
        return buffer.view(dtype) if buffer.numel() else torch.empty(0, dtype=dtype)

    def used_bytes(self) -> int:
        self.mover.sweep()
        self.device.drain()
        self.mover.sweep()
        return sum(store.used_bytes for store in self.stores.values())

    def close(self) -> None:
        self.disk.gate.set()
        self.mover.close()
        for store in self.stores.values():
            store.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def sparse(numel: int, share: float = 0.5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """So many zeros, and among the rest patterns that arithmetic would not keep."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    x = x.view(dtype) if numel else torch.empty(0, dtype=dtype)
    x[torch.rand(numel, generator=generator) < share] = 0
    return x


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize(
    "numel", [0, 1, 127, 128, 129, PIECE - 1, PIECE, PIECE + 1, 9 * PIECE + 77]
)
def test_every_size_comes_back_bit_for_bit(bench: Bench, numel: int, dtype: torch.dtype) -> None:
    kind = dtype if dtype != torch.bfloat16 else torch.int16  # NumPy has no bfloat16
    x = sparse(numel, 0.5, kind)
    ticket = bench.out(x if kind is dtype else x.view(dtype) if numel else x)
    bench.wait_out(ticket)
    want = x.clone()
    x.zero_()
    for _ in range(2):
        assert same_bits(bench.back(ticket, kind), want)
    del ticket
    assert bench.used_bytes() == 0


def test_strides_other_than_contiguous_pack_memory_as_it_lies(bench: Bench) -> None:
    x = torch.randn(8, 3, 16, 16).relu().to(memory_format=torch.channels_last)
    ticket = bench.out(x)
    bench.wait_out(ticket)
    again = bench.back(ticket).as_strided(x.size(), x.stride())
    assert torch.equal(again, x)


def test_what_is_written_is_what_was_packed(bench: Bench) -> None:
    x = sparse(16 * PIECE, 0.9)
    raw = x.nbytes
    slot = bench.wait_out(bench.out(x))
    written = sum(nbytes for _, nbytes in bench.disk.written)
    assert slot.crossed_bytes <= written <= slot.crossed_bytes + 17 * PAGE_BYTES
    assert written < 0.25 * raw
    # one piece behind the other: the disk sees one ascending run
    ends = [offset + nbytes for offset, nbytes in bench.disk.written]
    assert [offset for offset, _ in bench.disk.written[1:]] == ends[:-1]


def test_counters_tell_packed_from_raw(bench: Bench) -> None:
    x = sparse(PIECE, 0.9)
    ticket = bench.out(x)
    slot = bench.wait_out(ticket)
    bench.back(ticket)
    bench.device.drain()
    tally = bench.mover.tally
    assert (tally.raw_bytes_out, tally.raw_bytes_in) == (x.nbytes, x.nbytes)
    assert tally.bytes_out == tally.bytes_in == slot.crossed_bytes < 0.2 * x.nbytes


def test_the_worst_case_has_room_and_no_more_is_taken(bench: Bench) -> None:
    dense = sparse(9 * PIECE + 5, 0.0)
    ticket = bench.out(dense)
    slot = bench.wait_out(ticket)
    assert slot.crossed_bytes > dense.nbytes
    assert sum(p.padded_bytes for p in slot.pieces) <= slot.extent.padded_nbytes
    assert same_bits(bench.back(ticket), dense)
    # at most the masks, the offsets and a page for each piece
    assert slot.extent.padded_nbytes < 1.06 * dense.nbytes


def test_a_tier_without_room_for_the_worst_case_yields_or_refuses() -> None:
    x = sparse(PIECE, 0.99)
    bench = Bench(host=x.nbytes, disk=None)
    ticket = bench.out(x)
    assert bench.wait_out(ticket).tier == "disk"
    assert same_bits(bench.back(ticket), x)
    bench.close()
    bench = Bench(host=x.nbytes)
    with pytest.raises(SpillFull, match=r"no room for \d+ bytes"):
        bench.out(x)
    assert bench.used_bytes() == 0
    bench.close()


@pytest.mark.parametrize("name", ["fp16", "bf16", "bitmask+fp16"])
def test_a_stash_comes_back_widened_and_the_tensor_stays(bench: Bench, name: str) -> None:
    x = torch.randn(3 * PIECE + 5).relu()
    kept = x.clone()
    ticket = bench.out(x, name)
    slot = bench.wait_out(ticket)
    assert torch.equal(x, kept)
    half = torch.bfloat16 if "bf16" in name else torch.float16
    assert torch.equal(bench.back(ticket), x.to(half).float())
    assert slot.crossed_bytes <= 0.54 * x.nbytes


def test_a_codec_says_what_it_does_not_take(bench: Bench) -> None:
    with pytest.raises(OffloadError, match=r'"fp16" takes torch.float32, not torch.int64'):
        bench.out(torch.arange(5), "fp16")
    with pytest.raises(OffloadError, match='no codec "zip"'):
        bench.out(torch.zeros(5), "zip")
    assert bench.used_bytes() == 0
    assert bench.mover._gauges()["live_tickets"] == 0


# -- faults ------------------------------------------------------------------------------------


BIG = 40 * PIECE  # several halves of the staging


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_disk_that_fails_in_the_middle_of_a_packed_write(bench: Bench, at: int) -> None:
    bench.disk.fails_at = at
    ticket = bench.out(sparse(BIG, 0.3))
    with pytest.raises(OffloadError, match=r"x \(\d+ bytes\) could not be copied out.*drive"):
        bench.wait_out(ticket)
    with pytest.raises(OffloadError, match="it had not been written there"):
        bench.back(ticket)
    bench.disk.fails_at = None
    x = sparse(BIG, 0.6)
    good = bench.out(x)
    bench.wait_out(good)
    assert same_bits(bench.back(good), x)
    del ticket, good
    gc.collect()
    assert bench.used_bytes() == 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_disk_that_fails_in_the_middle_of_a_packed_read(bench: Bench, at: int) -> None:
    x = sparse(BIG, 0.3)
    ticket = bench.out(x)
    bench.wait_out(ticket)
    bench.disk.fails_at = at
    with pytest.raises(OffloadError, match=r"x \(\d+ bytes\) could not be loaded from"):
        bench.back(ticket)
    bench.disk.fails_at = None
    assert same_bits(bench.back(ticket), x)


def test_packed_bytes_that_changed_on_the_disk_are_told(bench: Bench) -> None:
    x = sparse(PIECE, 0.3)
    ticket = bench.out(x)
    slot = bench.wait_out(ticket)
    block = bench.device.arena.block(PAGE_BYTES)
    np.frombuffer(block.view, np.uint8)[:] = 0xFF
    slot.store.write(slot.extent, 0, block.view)
    with pytest.raises(OffloadError, match=r"x \(\d+ bytes\) could not be loaded.*do not add up"):
        bench.back(ticket)


def test_closing_lets_a_packed_copy_end(bench: Bench) -> None:
    bench.disk.gate.clear()
    ticket = bench.out(sparse(BIG, 0.3))
    bench.disk.at_gate.wait()
    closing = threading.Thread(target=bench.mover.close)
    closing.start()
    bench.disk.gate.set()
    closing.join()
    copy = tickets.find(ticket, Saved).copy
    assert copy is not None and copy.ended and copy.error is None
    assert bench.device.staging_bytes == 0


def test_staging_is_bounded_and_counted(bench: Bench) -> None:
    small = bench.out(sparse(1000))
    bench.wait_out(small)
    assert 0 < bench.device.staging_bytes <= 32 * KIB
    for _ in range(2):
        big = bench.out(sparse(BIG, 0.1))
        bench.wait_out(big)
        bench.back(big)
    assert bench.device.staging_bytes <= 2 * packing.STAGING_BYTES
    assert bench.mover._gauges()["in_flight_bytes"] == bench.device.staging_bytes


class Owner:
    """Somebody with a budget."""


def test_staging_keeps_to_the_smallest_bound_of_those_who_live(bench: Bench) -> None:
    x = sparse(BIG, 0.4)
    owners = {MIB: Owner(), 64 * KIB: Owner()}
    for most, owner in owners.items():
        bench.device.bound_packing(owner, most)
    del owner
    for most in (64 * KIB, MIB, packing.STAGING_BYTES):
        ticket = bench.out(x)
        bench.wait_out(ticket)
        assert same_bits(bench.back(ticket), x)
        # the staging of two lanes
        assert most < bench.device.staging_bytes <= 2 * most
        owners.pop(most, None)
        gc.collect()


def test_many_threads_pack_at_once(bench: Bench) -> None:
    xs = [sparse(3 * PIECE + i, 0.2 * i) for i in range(5)]
    found: list[bool] = []

    def go(x: torch.Tensor, lane: str) -> None:
        ticket = bench.mover.start_out(x, lane, "host", lane, "bitmask")
        found.append(same_bits(bench.back(ticket), x))

    threads = [threading.Thread(target=go, args=(x, f"out{i % 2}")) for i, x in enumerate(xs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 5


def test_worst_bytes_bound_what_a_piece_takes() -> None:
    for dtype in (torch.float32, torch.bool, torch.float64):
        for numel in (1, 128, 1000):
            x = torch.ones(numel, dtype=dtype)
            room = torch.empty(codec("bitmask").worst_bytes(numel, dtype), dtype=torch.uint8)
            assert codec("bitmask").pack(x, room) == room.numel()
