"""Reads the operating system's limits on this process, and the machine's PCI links."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from .posix import resource, usable_cores
from .process_memory import machine_memory_bytes

_RATE_OF_GENERATION = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


@dataclass(frozen=True)
class Limits:
    """Limits on this process; None if there is no limit, or the system does not report it."""

    #: memory that this process may use: the machine's, or less under a cgroup
    memory_bytes: int
    physical_bytes: int
    available_bytes: int | None
    cores: int
    threads: int
    memlock_bytes: int | None
    data_bytes: int | None
    address_bytes: int | None
    open_files: int | None
    #: "always", "madvise" or "never"
    huge_pages: str | None


@dataclass(frozen=True)
class PciLink:
    """The PCIe link of a card: its present speed, and the most that card and slot support."""

    generation: int
    width: int
    most_generation: int
    most_width: int


def read_limits(root: Path = Path("/")) -> Limits:
    """Read the limits. root: the folder that holds `proc` and `sys`; tests pass another one."""
    return Limits(
        memory_bytes=machine_memory_bytes(root),
        physical_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        available_bytes=_available_bytes(root),
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        memlock_bytes=_soft(resource.RLIMIT_MEMLOCK),
        data_bytes=_soft(resource.RLIMIT_DATA),
        address_bytes=_soft(resource.RLIMIT_AS),
        open_files=_soft(resource.RLIMIT_NOFILE),
        huge_pages=_huge_pages(root),
    )


def _soft(which: int) -> int | None:
    limit = resource.getrlimit(which)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _available_bytes(root: Path) -> int | None:
    for line in _text(root / "proc/meminfo").splitlines():
        key, _, rest = line.partition(":")
        if key == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return None


def _huge_pages(root: Path) -> str | None:
    """Returns the selected mode, which the file shows in brackets."""
    text = _text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = [word[1:-1] for word in text.split() if word.startswith("[")]
    return chosen[0] if chosen else None


def pci_link(address: str, root: Path = Path("/")) -> PciLink | None:
    """Returns the link of the card at `address` (`0000:01:00.0`), or None if it is not reported.

    An idle card may run its link below full speed: call this right after the card was used.
    """
    place = root / "sys/bus/pci/devices" / address
    found = []
    for which in ("current", "max"):
        speed = _text(place / f"{which}_link_speed").split()
        width = _text(place / f"{which}_link_width").strip()
        generation = _RATE_OF_GENERATION.get(_number(speed[0])) if speed else None
        if generation is None or not width.isdigit() or int(width) == 0:
            return None
        found += [generation, int(width)]
    return PciLink(*found)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def _text(path: Path) -> str:
    """Returns the file's text, or an empty string if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
