"""Checks that a directory can hold spill files: on a real disk, writable, safe from tampering."""

from __future__ import annotations

import os
import re
import stat
import tempfile
from pathlib import Path

from offcompile.ir import OffloadError

#: file systems in RAM: offloading tensors there would free nothing
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})
_MOUNTS = Path("/proc/self/mountinfo")

#: advice for a directory that cannot be used
ELSEWHERE = 'name a directory on another disk with options={"spill": "/path"}'


def filesystem_type(path: str | os.PathLike[str], mounts: Path = _MOUNTS) -> str | None:
    """Returns the type of the file system that holds `path`, or None if it is not known."""
    place = Path(path).resolve()
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    found: tuple[int, str] | None = None
    for line in lines:
        before, _, after = line.partition(" - ")
        point = Path(_unescaped(before.split()[4]))
        # a later mount on the same point hides earlier ones
        if place.is_relative_to(point) and (found is None or len(point.parts) >= found[0]):
            found = (len(point.parts), after.split()[0])
    return None if found is None else found[1]


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), text)


def in_memory(path: str | os.PathLike[str]) -> bool:
    """True if files under `path` are kept in RAM."""
    return filesystem_type(path) in _MEMORY_FILESYSTEMS


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Returns the bytes that this user can still write to the file system of `path`."""
    try:
        told = os.statvfs(path)
    except OSError as error:
        raise OffloadError(
            f"the free space of {os.fspath(path)} cannot be read ({error.strerror}): {ELSEWHERE}"
        ) from error
    return told.f_bavail * told.f_frsize


def check_directory(path: str | os.PathLike[str], elsewhere: str = ELSEWHERE) -> None:
    """Raise an OffloadError that names `path` and the fix, unless it can hold spill files."""
    shown = f"the spill directory {os.fspath(path)}"
    try:
        told = os.stat(path)
    except FileNotFoundError:
        raise OffloadError(f"{shown} does not exist: create it, or {elsewhere}") from None
    except OSError as error:
        raise OffloadError(f"{shown} cannot be used ({error.strerror}): {elsewhere}") from error
    if not stat.S_ISDIR(told.st_mode):
        raise OffloadError(f"{shown} is not a directory: {elsewhere}")
    kind = filesystem_type(path)
    if kind in _MEMORY_FILESYSTEMS:
        raise OffloadError(
            f"{shown} is on {kind}, which keeps files in RAM, so that moving tensors there frees "
            f"nothing: {elsewhere}"
        )
    open_to_all = told.st_mode & stat.S_IWOTH and not told.st_mode & stat.S_ISVTX
    if told.st_uid != os.geteuid() and open_to_all:
        raise OffloadError(
            f"{shown} belongs to another user (uid {told.st_uid}) and anyone may write to it: "
            f"`chmod +t` it, or {elsewhere}"
        )
    try:
        # permission bits do not reflect read-only mounts, quotas or the rights of root
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise OffloadError(
            f"{shown} is not writable ({error.strerror}): make it so, or {elsewhere}"
        ) from error


def default_directory() -> Path:
    """Returns the system's temporary directory, or /var/tmp if that one is kept in RAM."""
    asked = [Path(tempfile.gettempdir()), Path("/var/tmp")]
    refused = []
    for directory in asked:
        try:
            check_directory(directory)
        except OffloadError as error:
            refused.append(str(error))
        else:
            return directory
    raise OffloadError("no default directory for spill files: " + "; ".join(refused))
