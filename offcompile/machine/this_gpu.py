"""The CUDA card that this process uses, as a hardware profile and as a machine to plan for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from offcompile.ir import DEVICE, Lane, Machine, Tier

from .hardware import DISK, HardwareProfile, shared_links, to_machine

Progress = Callable[[str], None]


def to_cuda_machine(
    profile: HardwareProfile,
    host_bytes: int | None = None,
    disk: bool = False,
    disk_bytes: int | None = None,
) -> Machine:
    """The machine to plan for: `device` is the card, `host` pinned memory, `disk` (if any) files.

    The disk is accessed from the card directly: data that passes through the host takes a few
    blocks of staging there, which plans can ignore. Its lanes are as slow as the slower of drive
    and link, and share the link with `h2d` and `d2h`.
    """
    machine = to_machine(profile, None, host_bytes)
    if not disk:
        return machine
    inwards, outwards = machine.lane["h2d"], machine.lane["d2h"]
    with_disk = to_machine(profile, None, host_bytes, disk=True)
    read, write = with_disk.lane["disk_read"], with_disk.lane["disk_write"]
    lanes = (
        Lane(
            "disk_to_device",
            DISK,
            DEVICE,
            min(read.bytes_per_us, inwards.bytes_per_us),
            read.latency_us + inwards.latency_us,
        ),
        Lane(
            "device_to_disk",
            DEVICE,
            DISK,
            min(write.bytes_per_us, outwards.bytes_per_us),
            write.latency_us + outwards.latency_us,
        ),
    )
    tiers = (*machine.tiers, Tier(DISK, disk_bytes))
    shared = shared_links(profile, ("h2d", "disk_to_device"), ("d2h", "device_to_disk"))
    return replace(machine, tiers=tiers, lanes=machine.lanes + lanes, shared=shared)


def this_gpu(
    index: int,
    directories: Sequence[Path] = (),
    refresh: bool = False,
    progress: Progress | None = None,
) -> HardwareProfile:
    """Returns the profile of the card `cuda:index` and its links, cached or measured now."""
    from .gpu_figures import gpu_profile

    return gpu_profile(index, tuple(directories), refresh, progress)
