"""What the doctor found: plain figures, so that words about them need no machine."""

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
    #: whether the page cache can be passed by
    direct_io: bool
    read_gbps: float
    write_gbps: float
    latency_us: float
    read_both_gbps: float | None = None
    write_both_gbps: float | None = None
    read_buffered_gbps: float | None = None
    write_buffered_gbps: float | None = None
    #: what may be written each day if the drive is to last five years, by its size
    daily_bytes: float | None = None


@dataclass(frozen=True)
class Gpu:
    """A card. Without a profile it could not be measured; `failed` says why."""

    index: int
    name: str
    profile: HardwareProfile | None
    link: PciLink | None = None
    #: what could not be measured → why
    failed: Mapping[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True)
class Examination:
    limits: Limits
    #: what the CPU target plans with
    cpu: HardwareProfile
    spills: tuple[Spill, ...]
    gpus: tuple[Gpu, ...] = ()
    #: why there is no card, in one line
    no_gpu: str | None = None
    #: why cards do not reach the spill directories past host memory; None: they do
    no_direct_files: str | None = None
    #: "2.36"; None: another C library
    glibc: str | None = None
    #: whether this process's malloc keeps holes that `offcompile run` avoids
    leaves_holes: bool = False
    container: bool = False
    wsl: bool = False
    failed: Mapping[str, str] = field(default_factory=dict)
