"""What the operating system says of this process's memory, and how freed memory gets back to it."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offcompile.ir import OffloadError

#: blocks at least this large get a mapping of their own, which is unmapped when they are freed
RETURNED_BYTES = 1 << 20

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_PR_SET_THP_DISABLE, _PR_GET_THP_DISABLE = 41, 42  # prctl.h of Linux
_STATUS = Path("/proc/self/status")


class Resident(NamedTuple):
    """Bytes of RAM that this process holds."""

    anon_bytes: int  # its own, shared memory included: only swap could take these
    file_bytes: int  # pages of files: the system may drop them and read them again


@dataclass(frozen=True)
class Allocator:
    """The process's malloc, and whether it now gives large freed blocks back at once."""

    name: str
    returns_freed: bool


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
    """What this process holds in RAM now; OffloadError where the system does not tell."""
    anon, shared, file = _status("RssAnon", "RssShmem", "RssFile")
    return Resident(anon + shared, file)


def peak_bytes() -> int:
    """Most RAM that this process has held since its start, or since `reset_peak()`."""
    if _STATUS.exists():
        return _status("VmHWM")[0]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> bool:
    """Make `peak_bytes()` count from now; False where the system has no such switch."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


@contextmanager
def small_pages() -> Iterator[None]:
    """Inside, what this process touches comes in pages of the usual size, and counts as such: the
    first byte of a huge page would count 2 MiB. Where the system has no such switch, nothing."""
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
    """Private writable memory mapped now, touched or not: what RLIMIT_DATA bounds."""
    return _status("VmData")[0]


def machine_memory_bytes(root: Path = Path("/")) -> int:
    """RAM that this process may use: that of the machine, or less under a cgroup's limit.

    root: where to look for `proc` and `sys`, another place in tests.
    """
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([physical, *_cgroup_limits(root)])


def _cgroup_limits(root: Path) -> list[int]:
    """The memory limits of this process's cgroup and of those around it, v1 and v2."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in groups:
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        kind, name = (
            ("cgroup", "memory.limit_in_bytes") if controllers else ("cgroup2", "memory.max")
        )
        for mount in mounts:
            before, _, after = mount.partition(" - ")
            fields, described = before.split(), after.split()
            if described[0] != kind:
                continue
            if controllers and "memory" not in described[-1].split(","):
                continue
            limits += _limits_up(root / fields[4].lstrip("/"), fields[3], group, name)
    return limits


def _limits_up(top: Path, mounted: str, group: str, name: str) -> list[int]:
    """Limits from `group` up to the `top` of a hierarchy of which `mounted` is what one sees."""
    place = Path(group)
    # in a container the path may be the host's, of which only the mounted part is to be seen
    inside = place.relative_to(mounted) if place.is_relative_to(mounted) else Path()
    limits = []
    for folder in (inside, *inside.parents):
        try:
            text = (top / folder / name).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            limits.append(int(text))
    return limits


def return_freed_memory() -> Allocator:
    """Have malloc give freed blocks of 1 MiB and more back to the system; say which malloc it is.

    glibc raises its threshold with every large block that is freed, up to 32 MiB, and keeps what
    lies below it: a program that moves its tensors out may then hold more than one that does not.
    What it has kept so far goes back now, what comes later when it is freed, at the price of a
    first touch for every large block. Other allocators are left as they are.
    """
    process = ctypes.CDLL(None)
    for symbol, name in (
        ("mallctl", "jemalloc"),
        ("tc_version", "tcmalloc"),
        ("mi_version", "mimalloc"),
    ):
        if hasattr(process, symbol):
            return Allocator(name, returns_freed=False)
    if not hasattr(process, "gnu_get_libc_version"):
        return Allocator(f"the allocator of {sys.platform}", returns_freed=False)
    version = process.gnu_get_libc_version
    version.restype = ctypes.c_char_p
    done = process.mallopt(_M_MMAP_THRESHOLD, RETURNED_BYTES) == 1
    process.malloc_trim(0)
    return Allocator(f"glibc {version().decode()}", returns_freed=done)
