"""This machine as a profile: measured once, kept, and turned into what the CPU target plans for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import offcompile.machine.this_machine as module
from offcompile.ir import InvalidInput, OffloadError
from offcompile.machine import tolls
from offcompile.machine.cost_cache import MEASURED, document_path
from offcompile.machine.hardware import load_profile
from offcompile.machine.this_machine import this_machine, to_cpu_machine
from offcompile.machine.tolls import BUSY_DISK_SHARE
from offcompile.runtime.base import once
from offcompile.runtime.base.process_memory import machine_memory_bytes
from offcompile.runtime.disk.speed import DiskSpeed
from offcompile.runtime.measure.timing import cpu_model, machine_identity


class Instruments:
    """In place of the real ones: what was measured, and how fast it was."""

    def __init__(self) -> None:
        self.used: list[str] = []
        self.factor = 1.0
        self.disturbed = False

    def memory(self) -> float:
        self.used.append("memory")
        return 20_000.0 * self.factor

    def matmul(self, dtype: torch.dtype) -> float:
        self.used.append(str(dtype))
        return 0.5e6 * self.factor

    def disk(self, directory: Path, seconds: float) -> DiskSpeed:
        self.used.append(f"disk {directory.name}")
        return DiskSpeed(2000.0 * self.factor, 1000.0 * self.factor, 80.0 / self.factor)

    def toll(self) -> float | None:
        self.used.append("toll")
        return None if self.disturbed else 0.9

    def disk_toll(self, directory: Path) -> float | None:
        self.used.append(f"toll of {directory.name}")
        return None if self.disturbed else 0.2 if directory.name == "b" else 0.1

    def watch(self) -> FakeWatch:
        return FakeWatch(self.disturbed)


class FakeWatch:
    def __init__(self, disturbed: bool) -> None:
        self.disturbed = disturbed

    def __enter__(self) -> FakeWatch:
        return self

    def __exit__(self, *error: object) -> None:
        return None


@pytest.fixture
def instruments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Instruments:
    monkeypatch.setenv("OFFCOMPILE_CACHE_DIR", str(tmp_path / "cache"))
    made = Instruments()
    monkeypatch.setattr(module, "memory_bytes_per_us", made.memory)
    monkeypatch.setattr(module, "matmul_flop_per_us", made.matmul)
    monkeypatch.setattr(module, "measure_disk", made.disk)
    monkeypatch.setattr(module, "Stopwatch", made.watch)
    monkeypatch.setattr(tolls, "copy_toll_share", made.toll)
    monkeypatch.setattr(tolls, "disk_toll_share", made.disk_toll)
    monkeypatch.setattr(module, "check_directory", lambda directory: None)
    return made


@pytest.fixture
def later() -> Callable[[], object]:
    """A call that forgets the figures in memory, as if in another process."""
    return partial(once.forget, MEASURED)


def test_it_is_measured_once_and_kept(instruments: Instruments, tmp_path: Path) -> None:
    told: list[str] = []
    profile = this_machine([tmp_path], progress=told.append)
    assert profile.measured
    assert profile.device_memory_bytes == machine_memory_bytes()
    assert (profile.memory_gbps, profile.matmul_tflops["fp32"]) == (20.0, 0.5)
    assert (profile.h2d_gbps, profile.d2h_gbps, profile.latency_us) == (2.0, 1.0, 80.0)
    assert (profile.copy_toll_share, profile.disk_toll_share) == (0.9, 0.1)
    assert len(told) == len(instruments.used) == 8
    assert this_machine([tmp_path]) == profile
    assert len(instruments.used) == 8
    instruments.factor = 2.0
    assert this_machine([tmp_path], refresh=True).h2d_gbps == 4.0
    assert this_machine([tmp_path]).h2d_gbps == 4.0


def test_disks_add_up_and_one_disk_counts_once(
    instruments: Instruments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    assert this_machine(places).h2d_gbps == 2.0
    assert instruments.used[-3:] == ["disk a", "toll", "toll of a"]
    monkeypatch.setattr(module, "_device", lambda place: 7 if place.name == "a" else 8)
    profile = this_machine(places)
    assert (profile.h2d_gbps, profile.d2h_gbps, profile.latency_us) == (4.0, 2.0, 80.0)
    assert profile.disk_toll_share == 0.2  # of the one that takes more


def test_threads_and_precision_are_part_of_who_the_machine_is(instruments: Instruments) -> None:
    before, threads = machine_identity(), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert machine_identity() != before
    finally:
        torch.set_num_threads(threads)
    assert machine_identity() == before
    assert cpu_model()


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"format": 1, "content": {"memory": -1}}'])
def test_a_broken_file_is_replaced(
    instruments: Instruments, later: Callable[[], None], tmp_path: Path, text: str
) -> None:
    this_machine([tmp_path])
    document_path("machine", machine_identity()).write_text(text)
    later()
    this_machine([tmp_path])
    assert instruments.used.count("memory") == 2
    later()
    this_machine([tmp_path])
    assert instruments.used.count("memory") == 2


def test_what_was_measured_on_a_busy_machine_is_measured_again_and_the_best_kept_unless_near(
    instruments: Instruments, later: Callable[[], None], tmp_path: Path
) -> None:
    instruments.disturbed = True
    found = []
    for factor in (1.0, 3.0, 3.2, 9.0):
        instruments.factor = factor
        for _ in range(2):  # once per process
            profile = this_machine([tmp_path])
        found.append((profile.memory_gbps, profile.latency_us))
        later()
    assert found == [(20.0, 80.0), (60.0, 80.0 / 3), (60.0, 80.0 / 3), (60.0, 80.0 / 3)]
    assert instruments.used.count("memory") == 3


@pytest.mark.parametrize(
    ("cores", "shares"),
    [(1, (1.0, BUSY_DISK_SHARE)), (2, (1.0, BUSY_DISK_SHARE)), (3, (0.0, 0.0))],
)
def test_what_moves_take_is_not_kept_from_a_busy_machine(
    cores: int,
    shares: tuple[float, float],
    instruments: Instruments,
    later: Callable[[], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(module.os, "sched_getaffinity", lambda pid: set(range(cores)))
    instruments.disturbed = True

    def found() -> tuple[float | None, float | None]:
        profile = this_machine([tmp_path])
        return profile.copy_toll_share, profile.disk_toll_share

    for _ in range(3):  # once per process
        assert found() == shares
    assert instruments.used.count("toll") == 1
    later()
    instruments.disturbed = False
    assert found() == (0.9, 0.1)
    instruments.disturbed = True
    assert found() == (0.9, 0.1)


def test_no_directory_and_a_missing_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no directory is given"):
        this_machine([])
    with pytest.raises(OffloadError, match="does not exist"):
        module.one_per_disk([tmp_path / "missing"])


def test_the_cpu_target_has_files_behind_a_budget_of_ram() -> None:
    machine = to_cpu_machine(load_profile("cpu"), 2**30)
    assert {t.name: t.capacity_bytes for t in machine.tiers} == {"device": 2**30, "host": None}
    assert [(x.name, x.source, x.target, x.bytes_per_us) for x in machine.lanes] == [
        ("h2d", "host", "device", 2000.0),
        ("d2h", "device", "host", 2400.0),
    ]


def test_a_limited_host_tier_has_the_disk_beside_it() -> None:
    machine = to_cpu_machine(load_profile("cpu"), 2**30, 2**28)
    tiers = {t.name: t.capacity_bytes for t in machine.tiers}
    assert tiers == {"device": 2**30, "host": 2**28, "disk": None}
    for name, like in (("disk_to_device", "h2d"), ("device_to_disk", "d2h")):
        lane, twin = machine.lane[name], machine.lane[like]
        assert (lane.bytes_per_us, lane.latency_us) == (twin.bytes_per_us, twin.latency_us)
    assert machine.lanes_between("disk", "device") and machine.lanes_between("device", "disk")


def test_more_than_the_machine_has_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"8\.00 GiB"):
        to_cpu_machine(load_profile("cpu"), 2**40)
