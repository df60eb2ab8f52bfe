"""What a graph will run on: which device, how much of it, over which links, with which runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offcompile.hardware import HardwareProfile, load_profile
from offcompile.ir import DEVICE, Machine
from offcompile.runtime.directories import check_directory, default_directory
from offcompile.runtime.memory import machine_memory_bytes
from offcompile.runtime.registry import RuntimeSettings

from .options import Options, default_spill
from .this_machine import this_machine, to_cpu_machine

KIB, MIB = 1 << 10, 1 << 20
#: what the runtime takes of a budget for its own: staging, and holes too small to be reused
RESERVE_SHARE, LEAST_RESERVE, MOST_RESERVE = 64, 512 * KIB, 32 * MIB
#: the share of a budget that is left to holes between tensors where moving more costs nothing
HOLES_SHARE = 4
#: staging: one block per lane that writes
ARENA_BYTES = 512 * KIB
#: most that one system call moves: large, since each one's end waits for Python's lock
CHUNK_BYTES = 8 * MIB


@dataclass(frozen=True)
class Target:
    """The CPU target: the device is a budget of RAM, the slow tiers are files."""

    profile: HardwareProfile
    directories: tuple[Path, ...]
    device_bytes: int
    host_bytes: int | None

    def machine(self, device_bytes: int) -> Machine:
        whole = to_cpu_machine(self.profile, None, self.host_bytes)
        return whole.with_capacity(DEVICE, device_bytes)

    @property
    def runtime(self) -> RuntimeSettings:
        return RuntimeSettings(
            target="cpu",
            directories=tuple(str(d) for d in self.directories),
            host_bytes=self.host_bytes,
            arena_bytes=ARENA_BYTES,
            chunk_bytes=CHUNK_BYTES,
        )


def reserve_bytes(budget_bytes: int) -> int:
    """What the runtime takes of a budget."""
    return min(max(budget_bytes // RESERVE_SHARE, LEAST_RESERVE), MOST_RESERVE)


def holes_bytes(budget_bytes: int) -> int:
    """What the runtime would have beside its reserve, so that freed blocks need not go back."""
    return budget_bytes // HOLES_SHARE


def target_for(options: Options, progress: Callable[[str], None] | None = None) -> Target:
    """Checks the spill directories and measures the machine, unless a profile is named."""
    directories = options.spill
    if directories == default_spill():
        directories = (default_directory(),)
    for directory in directories:
        check_directory(directory)
    if options.hardware is not None:
        profile = load_profile(options.hardware)
    else:
        profile = _measured(directories, progress)
    return Target(profile, directories, machine_memory_bytes(), options.host_memory)


@cache
def _measured(
    directories: tuple[Path, ...], progress: Callable[[str], None] | None
) -> HardwareProfile:
    return this_machine(directories, progress=progress)
