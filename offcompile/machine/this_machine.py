"""The machine that this process runs on, as a hardware profile: measured once, then cached.

On the CPU target the device tier is a budget of RAM and the host tier files in the spill
directories, so the link between them is the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from offcompile.ir import DEVICE, HOST, InvalidInput, Lane, Machine, Tier, Violation
from offcompile.runtime.base.posix import usable_cores
from offcompile.runtime.base.process_memory import machine_memory_bytes
from offcompile.runtime.disk.directories import check_directory, filesystem_type
from offcompile.runtime.measure.codecs import codec_bytes_per_us
from offcompile.runtime.measure.disk import measure_disk
from offcompile.runtime.measure.timing import (
    Stopwatch,
    cpu_model,
    machine_identity,
    matmul_flop_per_us,
    memory_bytes_per_us,
    undisturbed,
)

from .cost_cache import (
    MOST_TRIES,
    Identity,
    document_path,
    measured_here,
    nearly_same,
    positive_number,
    read_document,
    write_document,
)
from .hardware import (
    ADAM_BYTES_PER_PARAMETER,
    ATTENTION,
    BYTES_PER_US_PER_GBPS,
    CODECS,
    DISK,
    HardwareProfile,
    to_machine,
)
from .optional_figures import kept_more
from .tolls import copy_toll, disk_toll

Progress = Callable[[str], None]

DISK_SECONDS = 1.0
#: document of the speeds of codecs on this machine
CODEC_RATES = "codecs"
#: documents of the doctor's additional measurements
MORE_OF_MACHINE, MORE_OF_DISK = "machine-more", "disk-more"
#: in the order of `Disks`
MORE_DISK_FIGURES = ("read_both", "write_both", "read_buffered", "write_buffered")
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
    """Returns the profile of this machine with these directories, cached or measured now.

    Directories on different file systems count as different disks, whose rates add up.
    Measuring takes about two seconds plus three per disk, the first time or with `refresh`;
    `progress` is called with messages. Codec speeds are included if `codec_gbps` was ever called,
    other optional figures if the doctor was run.
    Raises `OffloadError` for a directory that cannot hold spill files.
    """
    if not directories:
        raise InvalidInput(
            [Violation("bad-value", "spill", "no directory is given: name one on a disk")]
        )
    tell = progress or (lambda text: None)
    rates = _compute_rates(refresh, tell)
    disks = disks_profile(directories, refresh, tell)
    places = [(place, disk_identity(place)) for place in one_per_disk(directories)]
    more = kept_more(MORE_OF_MACHINE, machine_identity())
    profile = HardwareProfile(
        name="this-machine",
        title=f"{cpu_model()}, {torch.get_num_threads()} threads",
        device_memory_bytes=machine_memory_bytes(),
        memory_gbps=rates["memory"] / BYTES_PER_US_PER_GBPS,
        h2d_gbps=disks.read_gbps,
        d2h_gbps=disks.write_gbps,
        source=f"measured here with torch {torch.__version__}; the link is the disk of "
        + ", ".join(map(str, directories)),
        matmul_tflops={name: rates[name] / FLOP_PER_US_PER_TFLOPS for name in MATMUL_DTYPES},
        latency_us=disks.latency_us,
        measured=True,
        h2d_both_gbps=disks.read_both_gbps,
        d2h_both_gbps=disks.write_both_gbps,
        attention_tflops=attention_tflops(more),
        codec_gbps=_kept_codecs(),
        copy_toll_share=copy_toll(refresh, tell),
        disk_toll_share=disk_toll(places, refresh, tell),
    )
    return with_host(with_disks(profile, disks))


@dataclass(frozen=True)
class Disks:
    """All spill directories together; None for figures that the doctor has not measured on all."""

    read_gbps: float
    write_gbps: float
    latency_us: float
    read_both_gbps: float | None = None
    write_both_gbps: float | None = None
    read_buffered_gbps: float | None = None
    write_buffered_gbps: float | None = None


def disks_profile(
    directories: Sequence[Path], refresh: bool = False, tell: Progress = lambda text: None
) -> Disks:
    """Combines the figures of the disks; one file system counts as one disk, and rates add up."""
    places = one_per_disk(directories)
    disks = [disk_figures(place, refresh, tell) for place in places]
    more = [kept_more(MORE_OF_DISK, disk_identity(place)) for place in places]

    def together(name: str) -> float | None:
        if not all(name in figures for figures in more):
            return None
        return sum(figures[name] for figures in more) / BYTES_PER_US_PER_GBPS

    return Disks(
        sum(disk["read"] for disk in disks) / BYTES_PER_US_PER_GBPS,
        sum(disk["write"] for disk in disks) / BYTES_PER_US_PER_GBPS,
        max(disk["latency"] for disk in disks),
        *(together(name) for name in MORE_DISK_FIGURES),
    )


def with_disks(profile: HardwareProfile, disks: Disks) -> HardwareProfile:
    return replace(
        profile,
        disk_read_gbps=disks.read_gbps,
        disk_write_gbps=disks.write_gbps,
        disk_latency_us=disks.latency_us,
        disk_read_both_gbps=disks.read_both_gbps,
        disk_write_both_gbps=disks.write_both_gbps,
        disk_read_buffered_gbps=disks.read_buffered_gbps,
        disk_write_buffered_gbps=disks.write_buffered_gbps,
    )


def with_host(profile: HardwareProfile) -> HardwareProfile:
    """Adds the known figures of the host's processor."""
    base = read_document("machine", machine_identity())
    more = kept_more(MORE_OF_MACHINE, machine_identity())
    memory, adam = positive_number((base or {}).get("memory")), more.get("adam")
    copy = more.get("copy")
    return replace(
        profile,
        host_memory_gbps=None if memory is None else memory / BYTES_PER_US_PER_GBPS,
        host_copy_gbps=None if copy is None else copy / BYTES_PER_US_PER_GBPS,
        host_adam_gbps=None
        if adam is None
        else adam * ADAM_BYTES_PER_PARAMETER / BYTES_PER_US_PER_GBPS,
    )


def attention_tflops(more: Mapping[str, float]) -> dict[str, float]:
    return {
        way: more[f"attention_{way}"] / FLOP_PER_US_PER_TFLOPS
        for way in ATTENTION
        if f"attention_{way}" in more
    }


def codec_gbps(refresh: bool = False, tell: Progress = lambda text: None) -> dict[str, float]:
    """Raw bytes that each codec packs or unpacks during compute, cached or measured now, which
    takes about three seconds."""

    def measure() -> dict[str, float]:
        tell("measuring codecs")
        return codec_bytes_per_us(tuple(CODECS))

    rates = figures_of(CODEC_RATES, machine_identity(), tuple(CODECS), measure, refresh)
    return {name: rate / BYTES_PER_US_PER_GBPS for name, rate in rates.items()}


def _kept_codecs() -> dict[str, float]:
    """Codec speeds that were measured before; there may be none."""
    kept = _numbers(read_document(CODEC_RATES, machine_identity()), tuple(CODECS)) or {}
    return {name: rate / BYTES_PER_US_PER_GBPS for name, rate in kept.items()}


def to_cpu_machine(
    profile: HardwareProfile,
    memory_bytes: int | None = None,
    host_bytes: int | None = None,
    disk_bytes: int | None = None,
) -> Machine:
    """The machine to plan for on the CPU target: `device` is a budget of RAM, `host` is files.

    With `host_bytes` (a limited host tier) there is a tier `disk` too, accessed from the device
    directly. It is the same drive: its lanes are planned as if they ran beside `h2d` and `d2h` at
    full rate, so a plan that uses both at once is too optimistic about time (never about memory).
    """
    link = replace(profile, host_memory_bytes=None)
    # copies use the disk, accesses in place what the page cache holds of the files
    machine = replace(to_machine(link, memory_bytes, host_bytes), shared=())
    if host_bytes is None:
        return machine
    inwards, outwards = machine.lane["h2d"], machine.lane["d2h"]
    assert (inwards.source, outwards.target) == (HOST, HOST)
    lanes = (
        Lane("disk_to_device", DISK, DEVICE, inwards.bytes_per_us, inwards.latency_us),
        Lane("device_to_disk", DEVICE, DISK, outwards.bytes_per_us, outwards.latency_us),
    )
    tiers = (*machine.tiers, Tier(DISK, disk_bytes))
    return replace(machine, tiers=tiers, lanes=machine.lanes + lanes)


# --- measuring -----------------------------------------------------------------------------


def _compute_rates(refresh: bool, tell: Progress) -> dict[str, float]:
    """`memory` in bytes per microsecond, and flop per microsecond of every dtype."""

    def measure() -> dict[str, float]:
        tell("measuring this machine: memory")
        rates = {"memory": memory_bytes_per_us()}
        for i, (name, dtype) in enumerate(MATMUL_DTYPES.items(), start=1):
            tell(f"measuring this machine: {name} matrix products ({i} of {len(MATMUL_DTYPES)})")
            rates[name] = matmul_flop_per_us(dtype)
        return rates

    return figures_of("machine", machine_identity(), ("memory", *MATMUL_DTYPES), measure, refresh)


def disk_figures(directory: Path, refresh: bool, tell: Progress) -> dict[str, float]:
    """`read` and `write` in bytes per microsecond, and `latency` in microseconds."""

    def measure() -> dict[str, float]:
        tell(f"measuring the disk of {directory} for about {DISK_SECONDS:g} s")
        with undisturbed():
            speed = measure_disk(directory, DISK_SECONDS)
        rates = (speed.read_bytes_per_us, speed.write_bytes_per_us, speed.latency_us)
        return dict(zip(_DISK_FIGURES, rates, strict=True))

    return figures_of("disk", disk_identity(directory), _DISK_FIGURES, measure, refresh)


def figures_of(
    kind: str,
    identity: Identity,
    names: Sequence[str],
    measure: Callable[[], dict[str, float]],
    refresh: bool,
) -> dict[str, float]:
    """The cached figures, or those measured and cached now.

    Figures measured while other work used the processor are measured again by later processes, a
    few times, keeping the best of each. They stay if they were nearly right.
    """
    content = read_document(kind, identity) or {}
    kept = None if refresh else _numbers(content, names)
    told = content.get("disturbed")
    tries = told if isinstance(told, int) else 0
    here = measured_here(document_path(kind, identity))
    if kept is not None and (kind in here or not 0 < tries < MOST_TRIES):
        return kept
    with Stopwatch() as watch:
        figures = measure()
    if watch.disturbed and kept is not None:
        better = {name: min if name == "latency" else max for name in names}
        figures = {name: better[name](figures[name], kept[name]) for name in names}
    if kept is not None and all(nearly_same(kept[name], figures[name]) for name in names):
        figures = kept
    disturbed = tries * (kept is not None) + 1 if watch.disturbed else 0
    here.add(kind)
    write_document(kind, identity, {**figures, "disturbed": disturbed})
    return figures


_DISK_FIGURES = ("read", "write", "latency")


def disk_identity(directory: Path) -> Identity:
    """The identity of a file system on a machine; torch's thread count does not matter to it."""
    device = _device(directory)
    return {
        "cpu": cpu_model(),
        "cores": usable_cores(),
        "device": f"{os.major(device)}:{os.minor(device)}",
        "filesystem": filesystem_type(directory) or "unknown",
        "bytes": os.statvfs(directory).f_blocks * os.statvfs(directory).f_frsize,
    }


def _device(directory: Path) -> int:
    """The system's number of the file system that holds the directory."""
    return os.stat(directory).st_dev


def one_per_disk(directories: Sequence[Path]) -> list[Path]:
    found: dict[int, Path] = {}
    for directory in directories:
        check_directory(directory)
        found.setdefault(_device(directory), directory)
    return list(found.values())


def _numbers(content: dict[str, object] | None, names: Sequence[str]) -> dict[str, float] | None:
    """Every named figure, or None if one is missing or invalid."""
    numbers = {name: positive_number((content or {}).get(name)) for name in names}
    found = {name: number for name, number in numbers.items() if number is not None}
    return found if len(found) == len(numbers) else None
