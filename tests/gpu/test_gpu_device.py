"""The CUDA device on a real GPU: data, orders, overlap, memory, several streams, the disk.

Plain functions without fixtures, so that a machine without pytest's plugins can run them too.
"""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda.copies import CudaCopy
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.streams import TorchStreams, flat_bytes
from offcompile.runtime.disk.gds import this_cufile
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.host_arena import HostArena
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Load, Saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
#: about a tenth of a second: long beside launches and copies, which take milliseconds
LONG_CYCLES = 200_000_000
STAGING_BYTES = 4 * MIB


class Bench:
    """A mover on the GPU, and short names for what graphs do."""

    def __init__(self, device: torch.device, arena: HostArena, store: SpillStore) -> None:
        self.on = device
        self.streams = TorchStreams(device)
        self.device = CudaDevice(self.streams, arena, {"disk": store}, STAGING_BYTES, timed=True)
        self.mover = Mover(self.device)

    def out(self, x: torch.Tensor, tier: str = "host") -> torch.Tensor:
        return self.mover.start_out(x, "x", tier, "d2h" if tier == "host" else "device_to_disk")

    def wait_out(self, ticket: torch.Tensor) -> None:
        self.mover.wait_out(tickets.find(ticket, Saved))

    def load(self, ticket: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        saved = tickets.find(ticket, Saved)
        return self.mover.start_load(
            saved, "x", "h2d" if saved.slot.tier == "host" else "disk_to_device"
        )

    def wait_load(self, load: torch.Tensor) -> None:
        self.mover.wait_load(tickets.find(load, Load))

    def there_and_back(self, x: torch.Tensor, tier: str = "host") -> torch.Tensor:
        ticket = self.out(x, tier)
        self.wait_out(ticket)
        buffer, load = self.load(ticket)
        self.wait_load(load)
        return buffer

    def settle(self) -> None:
        self.mover.sweep()
        self.device.drain()
        torch.cuda.synchronize(self.on)
        self.mover.sweep()


@contextmanager
def bench_on(index: int | None = None, host_bytes: int = 1 << 30) -> Iterator[Bench]:
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    arena = HostArena(host_bytes)
    with tempfile.TemporaryDirectory() as place, SpillStore([place], reserve_bytes=0) as store:
        bench = Bench(device, arena, store)
        try:
            yield bench
        finally:
            bench.mover.close()
            torch.cuda.synchronize(device)
            arena.close()


def copy_of(ticket: torch.Tensor, kind: type[Saved] | type[Load]) -> CudaCopy:
    copy = tickets.find(ticket, kind).copy
    assert isinstance(copy, CudaCopy)
    return copy


def test_the_same_bits_come_back() -> None:
    with bench_on() as bench:
        dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8)
        for tier in ("host", "disk"):
            for dtype in dtypes:
                for count in (1, 1023, 3 * MIB + 1):
                    x = torch.randint(0, 2, (count,), device=bench.on).to(dtype)
                    back = bench.there_and_back(x, tier)
                    assert torch.equal(back, flat_bytes(x)), (tier, dtype, count)
        empty = bench.there_and_back(torch.empty(0, device=bench.on))
        assert empty.numel() == 0
        turned = torch.rand(64, 32, 8, 8, device=bench.on).contiguous(
            memory_format=torch.channels_last
        )
        back = bench.there_and_back(turned)
        assert torch.equal(
            back.view(torch.float32).as_strided(turned.shape, turned.stride()), turned
        )


def test_large_tensors_go_to_files_past_the_host_and_come_back() -> None:
    found = this_cufile()
    if isinstance(found, str):
        pytest.skip(found)
    with bench_on() as bench:
        x = torch.randint(0, 256, (64 * MIB + 100,), dtype=torch.uint8, device=bench.on)
        kept = x.clone()
        torch.cuda._sleep(LONG_CYCLES)
        x += 1
        kept += 1
        ticket = bench.out(x, "disk")
        bench.wait_out(ticket)
        x.fill_(0)
        buffer, load = bench.load(ticket)
        bench.wait_load(load)
        assert torch.equal(buffer, kept)
        direct = bench.device._disk.direct
        if direct is None or direct._files is None:
            pytest.skip("the file system of temporary files does not take it: see the log")
        assert direct._works


def test_copies_wait_for_compute_and_compute_for_copies() -> None:
    with bench_on() as bench:
        for tier in ("host", "disk"):
            x = torch.zeros(8 * MIB, dtype=torch.uint8, device=bench.on)
            for value in range(1, 4):
                # the source of the copy is written late, and overwritten at once
                torch.cuda._sleep(LONG_CYCLES // 10)
                x.fill_(value)
                ticket = bench.out(x, tier)
                bench.wait_out(ticket)
                x.fill_(99)
                # the buffer's memory was just in use by kernels that are queued
                scratch = torch.full_like(x, 77)
                torch.cuda._sleep(LONG_CYCLES // 10)
                scratch.fill_(88)
                del scratch
                buffer, load = bench.load(ticket)
                bench.wait_load(load)
                assert bool((buffer == value).all()), (tier, value)


def test_the_host_does_not_wait() -> None:
    with bench_on() as bench:
        # memory that has to be fetched from the system may make the host wait: fetched before
        bench.there_and_back(torch.zeros(MIB, device=bench.on))
        bench.settle()
        x = torch.ones(MIB, device=bench.on)
        torch.cuda._sleep(LONG_CYCLES * 3)
        busy = bench.streams.record(bench.streams.compute())
        back = bench.there_and_back(x)
        assert not bench.streams.ended(busy)
        assert torch.equal(back, flat_bytes(x))


def test_copies_run_beside_compute_and_beside_each_other() -> None:
    with bench_on() as bench:
        streams = bench.streams
        x = torch.ones(64 * MIB, device=bench.on)
        bench.there_and_back(x)
        bench.settle()
        # a load that could run at once, and a copy out that could: then a long kernel
        saved = bench.out(x)
        bench.wait_out(saved)
        bench.settle()
        ticket = bench.out(x)
        _, load = bench.load(saved)
        begin = streams.record(streams.compute(), timing=True)
        torch.cuda._sleep(LONG_CYCLES)
        end = streams.record(streams.compute(), timing=True)
        out, back = copy_of(ticket, Saved), copy_of(load, Load)
        for event in (end, out.event, back.event):
            streams.synchronize(event)
        kernel_us = streams.elapsed_us(begin, end)
        print(f"kernel {kernel_us:.0f} us", end="")
        for name, copy in (("d2h", out), ("h2d", back)):
            took_us = streams.elapsed_us(copy.began, copy.event)
            print(f", {name} {took_us:.0f} us ({256 * MIB / took_us / 1e3:.1f} GB/s)", end="")
            assert streams.elapsed_us(copy.event, end) > 0, f"{name} ended after the kernel"
        print()
        # each began before the other ended
        assert streams.elapsed_us(out.began, back.event) > 0
        assert streams.elapsed_us(back.began, out.event) > 0


def test_memory_goes_round_at_the_wait() -> None:
    with bench_on() as bench:
        nbytes = 64 * MIB
        bench.there_and_back(torch.zeros(nbytes, dtype=torch.uint8, device=bench.on))
        bench.settle()
        before = bench.streams.memory()
        bench.streams.reset_peak()
        saved = []
        for value in range(10):
            x = torch.full((nbytes,), value, dtype=torch.uint8, device=bench.on)
            saved.append(bench.out(x))
            bench.wait_out(saved[-1])
            del x
        for value in range(10):
            buffer, load = bench.load(saved[value])
            bench.wait_load(load)
            assert bool((buffer == value).all())
            del buffer, load
        after = bench.streams.memory()
        # one tensor at a time, and the comparison's own
        assert after.peak_allocated_bytes - before.allocated_bytes <= 2 * nbytes + MIB
        del saved
        bench.settle()
        assert bench.streams.memory().allocated_bytes == before.allocated_bytes
        assert bench.mover._gauges() == {"live_tickets": 0, "in_flight_bytes": 0}


def test_two_compute_streams_and_threads() -> None:
    with bench_on() as bench:
        side = torch.cuda.Stream(bench.on)
        bad: list[int] = []

        def backward(ticket: torch.Tensor, value: int) -> None:
            with torch.cuda.stream(side):
                buffer, load = bench.load(ticket)
                bench.wait_load(load)
                if not bool((buffer == value).all()):
                    bad.append(value)

        for value in range(20):
            x = torch.full((4 * MIB,), value, dtype=torch.uint8, device=bench.on)
            torch.cuda._sleep(LONG_CYCLES // 100)
            ticket = bench.out(x)
            with torch.cuda.stream(side):
                bench.wait_out(ticket)
            # `side` waits, this stream does not: the memory must not come round yet
            del x
            torch.full((4 * MIB,), 200, dtype=torch.uint8, device=bench.on)
            thread = threading.Thread(target=backward, args=(ticket, value))
            thread.start()
            thread.join()
        assert bad == []


def test_no_tensor_is_given_to_another_stream_for_good() -> None:
    def refuse(tensor: torch.Tensor, stream: object) -> None:
        raise AssertionError("record_stream was called")

    kept = torch.Tensor.record_stream
    torch.Tensor.record_stream = refuse  # type: ignore[assignment, method-assign]
    try:
        with bench_on() as bench:
            x = torch.rand(MIB, device=bench.on)
            for tier in ("host", "disk"):
                assert torch.equal(bench.there_and_back(x, tier), flat_bytes(x))
    finally:
        torch.Tensor.record_stream = kept  # type: ignore[method-assign]


def test_a_full_host_tier_yields_to_the_disk() -> None:
    with bench_on(host_bytes=3 * STAGING_BYTES) as bench:
        saved = []
        for value in range(6):
            x = torch.full((STAGING_BYTES - 5,), value, dtype=torch.uint8, device=bench.on)
            saved.append(bench.out(x))
            bench.wait_out(saved[-1])
        tiers = [tickets.find(ticket, Saved).slot.tier for ticket in saved]
        assert set(tiers) == {"host", "disk"}
        for value, ticket in enumerate(saved):
            buffer, load = bench.load(ticket)
            bench.wait_load(load)
            assert bool((buffer == value).all()), tiers[value]


class Refusing:
    """CUDA as where memory cannot be locked."""

    def register(self, address: int, nbytes: int) -> int:
        return 2

    def unregister(self, address: int) -> int:
        return 0


def test_pageable_memory_moves_the_same_bits() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arena = HostArena(64 * MIB, 64 * MIB, registrar=Refusing())
    assert not arena.pinned
    mover = Mover(CudaDevice(TorchStreams(device), arena, {}))
    x = torch.rand(4 * MIB, device=device)
    want = x.clone()
    ticket = mover.start_out(x, "x", "host", "d2h")
    mover.wait_out(tickets.find(ticket, Saved))
    x.zero_()
    buffer, load = mover.start_load(tickets.find(ticket, Saved), "x", "h2d")
    mover.wait_load(tickets.find(load, Load))
    assert torch.equal(buffer.view(torch.float32), want)
    mover.close()
    arena.close()


def test_lane_streams_are_made_once() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    one, other = TorchStreams(device), TorchStreams(torch.device("cuda"))
    assert one.stream("d2h") is other.stream("d2h")
    assert one.stream("d2h") != one.stream("h2d")
    assert one.stream("d2h") != one.compute()


def test_another_gpu_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    with bench_on(index=1) as bench:
        assert torch.cuda.current_device() == 0
        for tier in ("host", "disk"):
            x = torch.rand(2 * MIB, device="cuda:1")
            back = bench.there_and_back(x, tier)
            assert back.device == x.device and torch.equal(back, flat_bytes(x))
        assert torch.cuda.current_device() == 0
