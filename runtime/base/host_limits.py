"""Finds how much more memory this process can allocate, and the limits that may stop pinning."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .posix import resource
from .process_memory import cgroup_folders, data_bytes, machine_memory_bytes, text_of

#: percentage of the machine's memory that an arena without an explicit limit may take
SHARE_PERCENT = 85
#: at most this much, or 5% of the limit, is left to everything else under any bound
MOST_SPARE_BYTES = 1 << 30


@dataclass(frozen=True)
class HostBound:
    """A bound: `nbytes` more can be allocated now. `source` names the limit, `advice` a remedy."""

    nbytes: int
    source: str
    advice: str


def default_limit_bytes(root: Path = Path("/")) -> int:
    """The default capacity of an arena: 85% of the machine's memory or the cgroup's."""
    return machine_memory_bytes(root) * SHARE_PERCENT // 100


def growth_bounds(root: Path = Path("/")) -> list[HostBound]:
    """Returns all known bounds on how much more memory this process can map and touch.

    root: where to look for `proc` and `sys`, another place in tests.
    """
    return [*_available(root), *_cgroups(root), *_rlimits()]


def memlock_bytes() -> int | None:
    """Returns the limit on locked memory (`ulimit -l`), or None if there is none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def in_wsl(root: Path = Path("/")) -> bool:
    """True if this Linux runs under Windows (WSL)."""
    return "microsoft" in text_of(root / "proc/sys/kernel/osrelease").lower()


def in_container(root: Path = Path("/")) -> bool:
    """True if this process runs in Docker, Podman or Kubernetes, going by files they create."""
    marks = (".dockerenv", "run/.containerenv", "var/run/secrets/kubernetes.io")
    return any((root / mark).exists() for mark in marks)


def _available(root: Path) -> Iterator[HostBound]:
    told = dict(
        line.split(":", 1) for line in text_of(root / "proc/meminfo").splitlines() if ":" in line
    )
    if "MemAvailable" in told and "MemTotal" in told:
        available, total = (
            int(told[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal")
        )
        yield HostBound(
            max(0, available - _spare_bytes(total)),
            f"the machine's free memory ({available} of {total} bytes available, "
            f"{_spare_bytes(total)} left alone)",
            "end other programs, or move less to the host (name a spill directory)",
        )


def _cgroups(root: Path) -> Iterator[HostBound]:
    for folder, (limit_name, usage_name, *cached_names) in cgroup_folders(root):
        limit, usage = text_of(folder / limit_name), text_of(folder / usage_name)
        if not (limit.isdigit() and usage.isdigit()):
            continue
        # a v1 group without a limit reports the largest possible number of pages
        if int(limit) >= 1 << 62:
            continue
        counted = dict(line.split() for line in text_of(folder / "memory.stat").splitlines())
        cached = sum(int(counted.get(name, 0)) for name in cached_names)
        spare = _spare_bytes(int(limit))
        # the kernel drops page cache when the memory is needed
        yield HostBound(
            max(0, int(limit) - max(0, int(usage) - cached) - spare),
            f"the cgroup's memory limit of {limit} bytes ({folder / limit_name})",
            "give the container or job more memory (docker run --memory, a pod's limits, "
            "systemd's MemoryMax)",
        )


def _rlimits() -> Iterator[HostBound]:
    for which, option, what in (
        (resource.RLIMIT_DATA, "-d", "data"),
        (resource.RLIMIT_AS, "-v", "addresses"),
    ):
        limit = resource.getrlimit(which)[0]
        if limit == resource.RLIM_INFINITY:
            continue
        used = data_bytes() if which == resource.RLIMIT_DATA else _address_bytes()
        yield HostBound(
            max(0, limit - used - _spare_bytes(limit)),
            f"the limit on this process's {what} (`ulimit {option}`: {limit} bytes, {used} taken, "
            f"{_spare_bytes(limit)} left alone)",
            f"raise it (`ulimit {option} unlimited`)",
        )


def _address_bytes() -> int:
    pages = (text_of(Path("/proc/self/statm")) or "0").split()[0]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _spare_bytes(total: int) -> int:
    return min(MOST_SPARE_BYTES, total // 20)
