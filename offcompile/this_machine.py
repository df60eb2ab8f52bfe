"""The machine that this process runs on, as a hardware profile: measured once, then remembered.

On the CPU target the device tier is a budget of RAM and the host tier files in the spill
directories, so the link between them is the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from offcompile.ir import DEVICE, HOST, InvalidInput, Lane, Machine, Tier, Violation
from offcompile.runtime.directories import check_directory, filesystem_type
from offcompile.runtime.measure import (
    Watch,
    cpu_model,
    machine_identity,
    matmul_flop_per_us,
    memory_bytes_per_us,
    undisturbed,
)
from offcompile.runtime.measure_disk import measure_disk
from offcompile.runtime.memory import machine_memory_bytes

from .cost_cache import (
    MOST_TRIES,
    Identity,
    document_path,
    positive_number,
    read_document,
    write_document,
)
from .hardware import BYTES_PER_US_PER_GBPS, DISK, HardwareProfile, to_machine

Progress = Callable[[str], None]

DISK_SECONDS = 1.0
FLOP_PER_US_PER_TFLOPS = 1e6
MATMUL_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def this_machine(
    directories: Sequence[Path], refresh: bool = False, progress: Progress | None = None
) -> HardwareProfile:
    """What this machine can do with these spill directories, from the cache or measured now.

    Directories on different file systems are taken to be different disks, whose rates add up.
    Takes about two seconds and one per disk, the first time or with `refresh`; `progress` is told.
    Raises `OffloadError` for a directory that cannot hold spill files.
    """
    if not directories:
        raise InvalidInput(
            [Violation("bad-value", "spill", "no directory is given: name one on a disk")]
        )
    tell = progress or (lambda text: None)
    rates = _compute_rates(refresh, tell)
    disks = [_disk(directory, refresh, tell) for directory in _one_per_disk(directories)]
    read_gbps = sum(disk["read"] for disk in disks) / BYTES_PER_US_PER_GBPS
    write_gbps = sum(disk["write"] for disk in disks) / BYTES_PER_US_PER_GBPS
    latency_us = max(disk["latency"] for disk in disks)
    return HardwareProfile(
        name="this-machine",
        title=f"{cpu_model()}, {torch.get_num_threads()} threads",
        device_memory_bytes=machine_memory_bytes(),
        memory_gbps=rates["memory"] / BYTES_PER_US_PER_GBPS,
        h2d_gbps=read_gbps,
        d2h_gbps=write_gbps,
        source=f"measured here with torch {torch.__version__}; the link is the disk of "
        + ", ".join(map(str, directories)),
        matmul_tflops={name: rates[name] / FLOP_PER_US_PER_TFLOPS for name in MATMUL_DTYPES},
        latency_us=latency_us,
        disk_read_gbps=read_gbps,
        disk_write_gbps=write_gbps,
        disk_latency_us=latency_us,
        measured=True,
    )


def to_cpu_machine(
    profile: HardwareProfile,
    memory_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Machine:
    """The machine to plan for on the CPU target: `device` is a budget of RAM, `host` is files.

    With `host_bytes` (a limited host tier) there is a tier `disk` too, reached from the device
    directly. It is the same drive: its lanes are planned as if they ran beside `h2d` and `d2h` at
    full rate, so a plan that uses both at once is too hopeful about time (never about memory).
    """
    link = replace(profile, host_memory_bytes=None)
    machine = to_machine(link, memory_bytes, host_bytes)
    if host_bytes is None:
        return machine
    inwards, outwards = machine.lane["h2d"], machine.lane["d2h"]
    assert (inwards.source, outwards.target) == (HOST, HOST)
    lanes = (
        Lane("disk_to_device", DISK, DEVICE, inwards.bytes_per_us, inwards.latency_us),
        Lane("device_to_disk", DEVICE, DISK, outwards.bytes_per_us, outwards.latency_us),
    )
    tiers = (*machine.tiers, Tier(DISK, disk_bytes))
    return Machine(tiers, machine.lanes + lanes, machine.codecs)


# --- measuring -----------------------------------------------------------------------------


def _compute_rates(refresh: bool, tell: Progress) -> dict[str, float]:
    """`memory` in bytes per microsecond and every dtype's flop per microsecond."""

    def measure() -> dict[str, float]:
        tell("measuring this machine: memory")
        rates = {"memory": memory_bytes_per_us()}
        for i, (name, dtype) in enumerate(MATMUL_DTYPES.items(), start=1):
            tell(f"measuring this machine: {name} matrix products ({i} of {len(MATMUL_DTYPES)})")
            rates[name] = matmul_flop_per_us(dtype)
        return rates

    return _figures("machine", machine_identity(), ("memory", *MATMUL_DTYPES), measure, refresh)


def _disk(directory: Path, refresh: bool, tell: Progress) -> dict[str, float]:
    """`read` and `write` in bytes per microsecond, and `latency` in microseconds."""

    def measure() -> dict[str, float]:
        tell(f"measuring the disk of {directory} for about {DISK_SECONDS:g} s")
        with undisturbed():
            speed = measure_disk(directory, DISK_SECONDS)
        rates = (speed.read_bytes_per_us, speed.write_bytes_per_us, speed.latency_us)
        return dict(zip(_DISK_FIGURES, rates, strict=True))

    return _figures("disk", _disk_identity(directory), _DISK_FIGURES, measure, refresh)


def _figures(
    kind: str,
    identity: Identity,
    names: Sequence[str],
    measure: Callable[[], dict[str, float]],
    refresh: bool,
) -> dict[str, float]:
    """The figures kept, or measured and kept now.

    Those taken while other work held the processor are taken again by the next processes, a few
    times; of those the best of each figure stays.
    """
    content = read_document(kind, identity) or {}
    kept = None if refresh else _numbers(content, names)
    told = content.get("disturbed")
    tries = told if isinstance(told, int) else 0
    here = (kind, document_path(kind, identity))
    if kept is not None and (here in _settled or not 0 < tries < MOST_TRIES):
        return kept
    with Watch() as watch:
        figures = measure()
    if watch.disturbed and kept is not None:
        better = {name: min if name == "latency" else max for name in names}
        figures = {name: better[name](figures[name], kept[name]) for name in names}
    disturbed = tries * (kept is not None) + 1 if watch.disturbed else 0
    _settled.add(here)
    write_document(kind, identity, {**figures, "disturbed": disturbed})
    return figures


#: what this process has measured: not twice in one process
_settled: set[tuple[str, Path]] = set()

_DISK_FIGURES = ("read", "write", "latency")


def _disk_identity(directory: Path) -> Identity:
    """A file system on a machine: how many threads torch has does not matter to it."""
    device = _device(directory)
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "device": f"{os.major(device)}:{os.minor(device)}",
        "filesystem": filesystem_type(directory) or "unknown",
        "bytes": os.statvfs(directory).f_blocks * os.statvfs(directory).f_frsize,
    }


def _device(directory: Path) -> int:
    """The file system that holds the directory, as the system numbers it."""
    return os.stat(directory).st_dev


def _one_per_disk(directories: Sequence[Path]) -> list[Path]:
    found: dict[int, Path] = {}
    for directory in directories:
        check_directory(directory)
        found.setdefault(_device(directory), directory)
    return list(found.values())


def _numbers(content: dict[str, object] | None, names: Sequence[str]) -> dict[str, float] | None:
    """Every named figure, or None if one is missing or makes no sense."""
    numbers = {name: positive_number((content or {}).get(name)) for name in names}
    found = {name: number for name, number in numbers.items() if number is not None}
    return found if len(found) == len(numbers) else None
