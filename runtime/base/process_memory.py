"""Reads the memory use of this process, and the memory of the machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offcompile.ir import OffloadError

from .posix import resource

_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42  # prctl.h of Linux
_STATUS = Path("/proc/self/status")
#: names of a memory cgroup's limit, its usage, and its cached bytes in `memory.stat`
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")
_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")


class Resident(NamedTuple):
    """The RAM that this process holds."""

    anon_bytes: int  # anonymous and shared memory: only swap could take it
    file_bytes: int  # file pages: the system may drop them and read them again


def _status(*keys: str) -> list[int]:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError as error:
        raise OffloadError(
            f"the memory of this process cannot be read from {_STATUS} ({error.strerror}): "
            "only Linux, with /proc mounted, tells it"
        ) from error
    found = {key: rest.split() for key, _, rest in (line.partition(":") for line in lines)}
    missing = [key for key in keys if key not in found]
    if missing:
        raise OffloadError(f"{_STATUS} has no {', '.join(missing)}: this kernel does not tell it")
    return [int(found[key][0]) * 1024 for key in keys]


def resident() -> Resident:
    """Returns the RAM this process holds now; raises OffloadError if the system does not tell."""
    anon, shared, file = _status("RssAnon", "RssShmem", "RssFile")
    return Resident(anon + shared, file)


def peak_bytes() -> int:
    """Returns the peak RAM of this process since its start, or since `reset_peak()`."""
    if _STATUS.exists():
        return _status("VmHWM")[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> bool:
    """Make `peak_bytes()` count from now; returns False if the system has no such switch."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def small_pages() -> Iterator[None]:
    """Disables huge pages inside the block, so that memory is counted in pages of the usual size:
    the first byte of a huge page would count 2 MiB. Does nothing if the system has no such switch.
    """
    process = ctypes.CDLL(None)
    before = process.prctl(_PR_GET_THP_DISABLE, 0, 0, 0, 0) if hasattr(process, "prctl") else -1
    if before == 0:
        process.prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
    try:
        yield
    finally:
        if before == 0:
            process.prctl(_PR_SET_THP_DISABLE, 0, 0, 0, 0)


def data_bytes() -> int:
    """Returns the private writable memory mapped now, touched or not; RLIMIT_DATA bounds it."""
    return _status("VmData")[0]


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """Returns the RAM that this process may use: the machine's, or less under a cgroup's limit.

    root: where to look for `proc` and `sys`, another place in tests.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> Iterator[int]:
    for folder, (limit_name, *_) in cgroup_folders(root):
        limit = text_of(folder / limit_name)
        if limit.isdigit():
            yield int(limit)


def cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yields the folders of this process's memory cgroup and its ancestors, with file names."""
    groups = text_of(root / "proc/self/cgroup").splitlines()
    mounts = text_of(root / "proc/self/mountinfo").splitlines()
    for _, controllers, group in (line.split(":", 2) for line in groups):
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, names = ("cgroup", _V1) if controllers else ("cgroup2", _V2)
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            fields, described = before.split(), after.split()
            if described[0] != kind:
                continue
            if controllers and "memory" not in described[-1].split(","):
                continue
            top, mounted = root / fields[4].lstrip("/"), fields[3]
            # in a container the path may be the host's, and only a part of it visible
            place = Path(group)
            inside = place.relative_to(mounted) if place.is_relative_to(mounted) else Path()
            for folder in (inside, *inside.parents):
                yield top / folder, names


def text_of(path: Path) -> str:
    """Returns a file's text without surrounding space; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
