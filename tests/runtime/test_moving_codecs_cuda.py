"""Packed copies of the CUDA device on simulated streams: data, races, faults, what is held."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_bench import (
    NOTHING,
    STAGING,
    Bench,
    Disk,
    bench_of,
    drop_before_the_wait,
    load_at_once,
    stage_much,
    train,
    wander,
)
from simulated_streams import Faults, SimulatedStreams
from test_runtime_cuda import (
    ComputeWaitsForNothing,
    KeepsNothing,
    LandsAtOnce,
    LanesWaitForNothing,
    LoadsDoNotWaitForTheCopyOut,
    NoMark,
    NoWaitLoad,
    NoWaitOut,
    ReadsOnTop,
)
from test_runtime_simulated import run as run_simulated

from offcompile.ir import OffloadError
from offcompile.runtime.codecs import TensorCodec
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda import packing as cuda_packing
from offcompile.runtime.device.cuda import staging
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.cuda.packing import Aside, PackedHostSlot
from offcompile.runtime.device.packing import PackedSlot
from offcompile.runtime.device.streams import Stream
from offcompile.runtime.moves.mover import Mover
from offcompile.runtime.moves.saved import Saved

IN_PLACE, ASIDE = True, False


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[dict[str, Disk]]:
    with Disk([tmp_path], reserve_bytes=0) as store:
        yield {"disk": store}


class OutOfReach(SimulatedStreams):
    """Kernels cannot use host memory in place."""

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self.reaches_host = False


def packing_bench(seed: int, in_place: bool, stores: dict[str, Disk], **more: object) -> Bench:
    streams = SimulatedStreams if in_place else OutOfReach
    bench = bench_of(seed, stores, streams=streams, **more)  # type: ignore[arg-type]
    bench.codec = "bitmask"
    return bench


def left(bench: Bench) -> dict[str, int]:
    found = bench.left()
    own = bench.device.staging_bytes
    return {
        **found,
        "device": found["device"] - own,
        "in_flight_bytes": found["in_flight_bytes"] - own,
    }


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("in_place", [IN_PLACE, ASIDE])
def test_no_race_whatever_the_timing(in_place: bool, tier: str, disk: dict[str, Disk]) -> None:
    for seed in range(120 if tier == "host" else 40):
        bench = packing_bench(seed, in_place, disk)
        if seed % 3:
            wander(bench, seed, tier, (1, 64, 300, STAGING + 77))
        else:
            train(bench, 2 * STAGING - 3 if seed % 2 else 64, tier)
        found = left(bench)
        bench.close()
        assert (bench.streams.races, bench.wrong, found) == ([], [], NOTHING), seed


@pytest.mark.parametrize("in_place", [IN_PLACE, ASIDE])
def test_no_race_when_streams_are_threads(in_place: bool, disk: dict[str, Disk]) -> None:
    for seed in range(6):
        bench = packing_bench(seed, in_place, disk, pace_s=0.0003)
        train(bench, 3000, ("host", "disk")[seed % 2])
        found = left(bench)
        bench.close()
        assert (bench.streams.races, bench.wrong, found) == ([], [], NOTHING), seed


class Packing(Mover):
    """All that leaves is packed."""

    def start_out(
        self, x: torch.Tensor, tag: str, tier: str, lane: str, codec: str | None = None
    ) -> torch.Tensor:
        return super().start_out(x, tag, tier, lane, "bitmask")


class PackingWithoutWaits(Packing, NoWaitOut):
    pass


def test_packed_moves_of_the_mover_race_only_where_an_order_is_taken_away() -> None:
    for seed in range(15):
        seen, races, _ = run_simulated(Packing, seed)
        assert (seen, races) == ([6, 5, 4, 3, 2, 1], []), seed
    _, races, _ = run_simulated(PackingWithoutWaits, 0)
    assert "read then write" in races


class PacksOnTop(Aside):
    """Packs on a stream of its own, into staging that may still be copied from."""

    def pack(
        self, stream: Stream, codec: TensorCodec, flat: torch.Tensor, room: torch.Tensor
    ) -> None:
        staged = self._room(stream, codec.worst_bytes(flat.numel(), flat.dtype))
        self.streams.pack(self.streams.stream("elsewhere"), codec, flat, staged)
        size = self._size(stream, codec, staged, flat)
        self.streams.copy(stream, room[:size], staged[:size])


@pytest.mark.parametrize(
    ("fault", "program", "expected", "in_place"),
    [
        (NoMark, train, "write then read", IN_PLACE),
        (LoadsDoNotWaitForTheCopyOut, load_at_once, "write then read", IN_PLACE),
        (NoWaitOut, train, "read then write", IN_PLACE),
        (NoWaitLoad, train, "write then read", IN_PLACE),
        (NoWaitLoad, train, "write then read", ASIDE),
        (LanesWaitForNothing, train, "write then read", IN_PLACE),
        (LanesWaitForNothing, train, "write then read", ASIDE),
        (ComputeWaitsForNothing, train, "write then read", IN_PLACE),
        (KeepsNothing, drop_before_the_wait, "read then write", IN_PLACE),
        (LandsAtOnce, stage_much, "write then read", IN_PLACE),
        (ReadsOnTop, stage_much, "read then write", IN_PLACE),
        (LandsAtOnce, stage_much, "write then read", ASIDE),
        (PacksOnTop, train, "write then read", ASIDE),
    ],
)
def test_an_order_taken_away_is_found_every_time(
    fault: type,
    program: Callable[[Bench], None],
    expected: str,
    in_place: bool,
    disk: dict[str, Disk],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if issubclass(fault, staging.Ring):
        monkeypatch.setattr(staging, "Ring", fault)
    if issubclass(fault, Aside):
        monkeypatch.setattr(cuda_packing, "Aside", fault)
    device = fault if issubclass(fault, CudaDevice) else CudaDevice
    mover = fault if issubclass(fault, Mover) else Mover
    for seed in range(12):
        bench = packing_bench(seed, in_place, disk, device=device, mover=mover)
        with suppress(OffloadError):  # what was read too early need not add up
            program(bench)
            bench.device.drain()
        bench.close()
        found = {race.kind for race in bench.streams.races}
        # a thread may give its work to the GPU before or after the work that it should wait for
        assert expected in found or (found and not in_place), seed


# -- what it does ----------------------------------------------------------------------------------


def fill_half(data: np.ndarray) -> None:
    """Every other element is zero."""
    data[:] = np.arange(data.size) % 251
    data[::2] = 0


def half_zero(bench: Bench, nbytes: int) -> torch.Tensor:
    x = bench.streams.empty(nbytes)
    bench.streams.launch(fill_half, (), (x,))
    return x


def expect_half(bench: Bench, x: torch.Tensor) -> None:
    def kernel(data: np.ndarray) -> None:
        want = np.empty_like(data)
        fill_half(want)
        if not np.array_equal(data, want):
            bench.wrong.append("not what was packed")

    bench.streams.launch(kernel, (x,))


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("in_place", [IN_PLACE, ASIDE])
@pytest.mark.parametrize("nbytes", [0, 1, 127, 4096, STAGING + 1, 5 * STAGING + 3])
def test_every_size_comes_back(
    nbytes: int, in_place: bool, tier: str, disk: dict[str, Disk]
) -> None:
    bench = packing_bench(1, in_place, disk)
    x = half_zero(bench, nbytes)
    ticket = bench.out(x, tier=tier)
    bench.wait_out(ticket)
    for _ in range(2):
        buffer, load = bench.load(ticket)
        bench.wait_load(load)
        expect_half(bench, buffer)
    bench.settle()
    slot = tickets.find(ticket, Saved).slot
    assert isinstance(slot, PackedHostSlot | PackedSlot)
    if nbytes > 1000:
        assert 0.5 * nbytes < slot.crossed_bytes < 0.7 * nbytes
    tally = bench.mover.tally
    assert (tally.raw_bytes_out, tally.raw_bytes_in) == (nbytes, 2 * nbytes)
    assert (tally.bytes_out, tally.bytes_in) == (slot.crossed_bytes, 2 * slot.crossed_bytes)
    del x, ticket, buffer, load, slot
    assert left(bench) == NOTHING
    assert (bench.wrong, bench.streams.races) == ([], [])
    bench.close()


def test_a_full_host_tier_yields_to_the_disk_with_the_codec(disk: dict[str, Disk]) -> None:
    bench = packing_bench(0, IN_PLACE, disk, limit_bytes=1)
    ticket = bench.out(half_zero(bench, 9000))
    bench.wait_out(ticket)
    assert isinstance(tickets.find(ticket, Saved).slot, PackedSlot)
    # rings without room in the arena are no memory that kernels reach
    assert not any(ring.from_arena for ring in bench.device._disk.rings.values())
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    expect_half(bench, buffer)
    del ticket, buffer, load
    assert left(bench) == NOTHING
    assert (bench.wrong, bench.streams.races) == ([], [])
    bench.close()


def test_a_device_without_kernels_moves_tensors_as_they_are() -> None:
    class NoKernels(SimulatedStreams):
        def why_not_pack(self, in_place: bool) -> str | None:
            return "kernels need Triton"

    bench = bench_of(0, streams=NoKernels)
    bench.codec = "bitmask"
    with pytest.warns(UserWarning, match="move unpacked.*kernels need Triton"):
        ticket = bench.out(half_zero(bench, 9000))
    bench.wait_out(ticket)
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    expect_half(bench, buffer)
    bench.settle()
    assert bench.mover.tally.bytes_out == 9000
    assert bench.wrong == []
    bench.close()


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("in_place", [IN_PLACE, ASIDE])
@pytest.mark.parametrize("kind", ["at_issue", "running"])
def test_a_packed_copy_that_fails_is_named_and_nothing_is_held(
    kind: str, in_place: bool, tier: str, disk: dict[str, Disk]
) -> None:
    for number in range(6):
        faults = Faults(**{kind: frozenset([number])})
        bench = packing_bench(number, in_place, disk, faults=faults)
        told: list[str] = []
        for name in ("a1", "a2"):
            ticket = buffer = load = None
            try:
                ticket = bench.out(half_zero(bench, 700), name, tier)
                bench.wait_out(ticket)
                buffer, load = bench.load(ticket, name)
                bench.wait_load(load)
                expect_half(bench, buffer)
                bench.device.drain()
            except OffloadError as error:
                told.append(str(error))
        del ticket, buffer, load
        found = left(bench)
        bench.close()
        assert found == NOTHING, (number, told)
        assert len(told) <= 1 and len(bench.wrong) <= len(told), (number, told, bench.wrong)
        assert number > 3 or told, number
        assert all(re.match(r"a[12] \(700 bytes\) could not be", t) for t in told), told
        assert bench.streams.races == [], number


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_disk_that_fails_in_the_middle_of_a_packed_move(at: int, disk: dict[str, Disk]) -> None:
    store = disk["disk"]
    bench = packing_bench(at, IN_PLACE, disk)
    ticket = bench.out(half_zero(bench, 9 * STAGING), "a", "disk", "device_to_disk")
    bench.wait_out(ticket)
    bench.settle()
    calls = 0

    def fails(*given: object) -> None:
        nonlocal calls
        calls += 1
        if calls > at:
            raise OSError(5, "Input/output error")

    written, store.write = store.write, fails  # type: ignore[method-assign]
    bad = bench.out(half_zero(bench, 9 * STAGING), "b", "disk", "device_to_disk")
    with pytest.raises(OffloadError, match=r"b .*could not be copied out.*Input/output error"):
        bench.wait_out(bad)
    bench.settle()
    store.write = written  # type: ignore[method-assign]
    told = ""
    try:
        buffer, load = bench.load(bad, "b", "disk_to_device")
        bench.wait_load(load)
    except OffloadError as error:
        told = str(error)
    assert "Input/output error" in told and "it had not been written there" in told
    buffer, load = bench.load(ticket, "a", "disk_to_device")
    bench.wait_load(load)
    expect_half(bench, buffer)
    del bad, ticket, buffer, load
    assert left(bench) == NOTHING
    assert (bench.wrong, bench.streams.races) == ([], [])
    bench.close()


def test_large_tensors_leave_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_packing, "MOST_ELEMENTS", 256)
    bench = packing_bench(0, IN_PLACE, {})
    ticket = bench.out(half_zero(bench, 1000))
    slot = tickets.find(ticket, Saved).slot
    assert isinstance(slot, PackedHostSlot) and len(list(slot.rooms)) == 4
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    expect_half(bench, buffer)
    bench.settle()
    assert (bench.wrong, bench.streams.races) == ([], [])
    bench.close()
