"""The CUDA device on simulated streams: no races, and races with any order taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cuda_bench import (
    NOTHING,
    PAGE,
    STAGING,
    Bench,
    Disk,
    bench_of,
    drop_before_the_wait,
    free_a_slot_that_was_read,
    load_at_once,
    stage_much,
    train,
    wait_on_another_stream,
    wander,
)
from lengths import some

from offcompile.runtime.device.cuda import staging
from offcompile.runtime.device.cuda.copies import CudaCopy
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.device.interface import Copy, Point, Waited
from offcompile.runtime.device.streams import Event, Stream
from offcompile.runtime.moves.mover import Mover


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[dict[str, Disk]]:
    with Disk([tmp_path], reserve_bytes=0) as store:
        yield {"disk": store}


# -- as it is ------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", some(range(8), 0, 3))
def test_no_race_whatever_the_timing(part: int) -> None:
    for seed in range(part, 2000, 8):
        bench = bench_of(seed, in_flight_bytes=None if seed % 3 else 150)
        if seed % 4 == 3:
            train(bench)
        else:
            wander(bench, seed, "host", (1, 64, 64, 200))
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


def test_no_race_between_device_and_disk(disk: dict[str, Disk]) -> None:
    for seed in range(150):
        bench = bench_of(seed, disk)
        if seed % 2:
            train(bench, 5 * PAGE - 3, "disk")
        else:
            wander(bench, seed, "disk", (1, 5000, 5000, 30_000))
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


def test_a_full_host_tier_yields_to_the_disk(disk: dict[str, Disk]) -> None:
    for seed in range(60):
        bench = bench_of(seed, disk, limit_bytes=2 * STAGING + 12_000)
        wander(bench, seed, "host", (100, 5000, 5000), steps=30)
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


def test_no_race_with_a_thread_for_each_stream(disk: dict[str, Disk]) -> None:
    for seed in range(40):
        bench = bench_of(seed, disk, pace_s=0.0002)
        train(bench, 5 * PAGE - 3 if seed % 2 else 64, "disk" if seed % 2 else "host")
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


@pytest.mark.parametrize(
    "program",
    [
        drop_before_the_wait,
        free_a_slot_that_was_read,
        load_at_once,
        wait_on_another_stream,
        stage_much,
    ],
)
def test_the_programs_for_planted_faults_are_clean(
    program: Callable[[Bench], None], disk: dict[str, Disk]
) -> None:
    for seed in range(40):
        bench = bench_of(seed, disk)
        program(bench)
        left = bench.left()
        bench.close()
        assert (bench.streams.races, bench.wrong, left) == ([], [], NOTHING), seed


# -- with one order taken away -------------------------------------------------------------------


class NoMark(Mover):
    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(None, out)


class NoMarkForLoads(Mover):
    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(mark if out is None else None, out)


class LoadsDoNotWaitForTheCopyOut(Mover):
    def _after(self, mark: Point | None, out: Copy | None = None) -> Sequence[Point]:
        return super()._after(mark, None)


class NoWaitOut(Mover):
    def _wait(self, copy: Copy, load: bool) -> None:
        if load:
            super()._wait(copy, load)


class NoWaitLoad(Mover):
    def _wait(self, copy: Copy, load: bool) -> None:
        if not load:
            super()._wait(copy, load)


class LanesWaitForNothing(CudaDevice):
    def _order(self, stream: Stream, after: Sequence[Point]) -> None:
        return None


class ComputeWaitsForNothing(CudaDevice):
    def _let_compute_wait(self, compute: Stream, event: Event) -> None:
        return None


class KeepsNothing(CudaDevice):
    def _ending(self, copy: CudaCopy) -> None:
        copy.keep = None
        super()._ending(copy)


class LetsGoOnAnyStream(CudaDevice):
    def wait(self, copy: Copy) -> Waited:
        assert isinstance(copy, CudaCopy)
        copy.home = self.streams.compute()
        return super().wait(copy)


class EndsUnseen(CudaDevice):
    """Completion threads do not wait for events."""

    def _complete(self, copy: CudaCopy) -> None:
        copy.event = None
        super()._complete(copy)


class LandsAtOnce(staging.Ring):
    """The disk writes a chunk that the GPU may still be filling."""

    def _land(self, chunk: staging.Chunk, step: staging.StagingStep) -> None:
        event, chunk.event = chunk.event, _Reached()
        super()._land(chunk, step)
        chunk.event = event


class ReadsOnTop(staging.Ring):
    """The disk fills a chunk that the GPU may still be reading."""

    def _settle(self, chunk: staging.Chunk) -> None:
        return None


@dataclass
class _Reached:
    done: bool = True
    clock: int = 0
    failed: None = None


Program = Callable[[Bench], None]


@pytest.mark.parametrize(
    ("fault", "program", "expected"),
    [
        (NoMark, train, "write then read"),
        (NoMarkForLoads, train, "read then write"),
        (LoadsDoNotWaitForTheCopyOut, load_at_once, "write then read"),
        (NoWaitOut, train, "read then write"),
        (NoWaitLoad, train, "write then read"),
        (LanesWaitForNothing, train, "write then read"),
        (ComputeWaitsForNothing, train, "write then read"),
        (KeepsNothing, drop_before_the_wait, "read then write"),
        (KeepsNothing, drop_before_the_wait, "write then write"),
        (LetsGoOnAnyStream, wait_on_another_stream, "read then write"),
        (EndsUnseen, free_a_slot_that_was_read, "read then write"),
        (LandsAtOnce, stage_much, "write then read"),
        (ReadsOnTop, stage_much, "read then write"),
    ],
)
def test_an_order_taken_away_is_found_every_time(
    fault: type, program: Program, expected: str, disk: dict[str, Disk], monkeypatch: object
) -> None:
    device = fault if issubclass(fault, CudaDevice) else CudaDevice
    mover = fault if issubclass(fault, Mover) else Mover
    if issubclass(fault, staging.Ring):
        monkeypatch.setattr("offcompile.runtime.device.cuda.staging.Ring", fault)  # type: ignore[attr-defined]
    for seed in range(40):
        bench = bench_of(seed, disk, device, mover)
        program(bench)
        bench.device.drain()
        bench.close()
        assert expected in {race.kind for race in bench.streams.races}, seed


def test_a_race_names_both_accesses() -> None:
    bench = bench_of(0, mover=NoWaitLoad)
    load_at_once(bench)
    bench.close()
    assert ("copy 1 on h2d", "expect 5") in {(r.first, r.second) for r in bench.streams.races}
