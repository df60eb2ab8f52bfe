"""The doctor's results as plain figures, so that explaining them needs no machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from offcompile.machine.hardware import HardwareProfile

if TYPE_CHECKING:
    from offcompile.runtime.base.limits import Limits, PciLink


@dataclass(frozen=True)
class Spill:
    """A spill directory and its disk. None: could not be measured."""

    directory: str
    filesystem: str | None
    free_bytes: int
    #: True if files can bypass the page cache
    direct_io: bool
    read_gbps: float
    write_gbps: float
    latency_us: float
    read_both_gbps: float | None = None
    write_both_gbps: float | None = None
    read_buffered_gbps: float | None = None
    write_buffered_gbps: float | None = None
    #: bytes that may be written each day for the drive to last five years, estimated by its size
    daily_bytes: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A GPU. `profile` is None if it could not be measured; `failed` says why."""

    index: int
    name: str
    profile: HardwareProfile | None
    link: PciLink | None = None
    #: figure that could not be measured → reason
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True)
class Examination:
    limits: Limits
    #: profile of the CPU target
    cpu: HardwareProfile
    spills: tuple[Spill, ...]
    gpus: tuple[Gpu, ...] = ()
    #: the reason that there is no GPU, in one line
    no_gpu: str | None = None
    #: the reason that GPUs cannot access spill directories without host memory; None: they can
    no_direct_files: str | None = None
    #: "2.36"; None: another C library
    glibc: str | None = None
    #: True if this process's malloc keeps holes that `offcompile run` avoids
    leaves_holes: bool = False
    container: bool = False
    wsl: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
