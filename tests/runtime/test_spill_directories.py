"""Directories for spill files: which will do, which are refused, and how fast their disk is."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from spill_files import descriptors

from offcompile.ir import OffloadError
from offcompile.runtime.disk import directories
from offcompile.runtime.disk.directories import (
    check_directory,
    default_directory,
    filesystem_type,
    free_bytes,
)
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.measure.disk import measure_disk

pytestmark = pytest.mark.usefixtures("on_a_disk")
MIB = 1 << 20
PAGE = 4096
linux = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
unprivileged = pytest.mark.skipif(os.geteuid() == 0, reason="permission bits do not bind root")


def test_a_directory_on_a_disk_will_do(tmp_path: Path) -> None:
    check_directory(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert 0 < free_bytes(tmp_path) <= os.statvfs(tmp_path).f_blocks * PAGE


def test_missing_and_wrong_directories_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, told in (
        ("missing", "does not exist: create it, or name a directory"),
        ("file", "is not a directory"),
        ("file/below", r"cannot be used \(Not a directory\)"),
    ):
        with pytest.raises(OffloadError, match=f"{tmp_path}/{name} {told}"):
            check_directory(tmp_path / name)
    with pytest.raises(OffloadError, match=r"free space of .*missing cannot be read"):
        free_bytes(tmp_path / "missing")


@linux
def test_memory_is_refused_as_a_slow_tier() -> None:
    if filesystem_type("/dev/shm") != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs here")
    for use in (check_directory, lambda path: SpillStore([path])):
        with pytest.raises(OffloadError, match="/dev/shm is on tmpfs, which keeps files in RAM"):
            use("/dev/shm")


@linux
def test_a_read_only_place_is_refused() -> None:
    # even root writes nothing here
    with pytest.raises(OffloadError, match=r"/proc/self is not writable \(.+\): make it so"):
        check_directory("/proc/self")


@unprivileged
def test_a_directory_without_permission_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(OffloadError, match="not writable"):
        check_directory(tmp_path)


@pytest.mark.parametrize(("mode", "fine"), [(0o777, False), (0o1777, True), (0o755, True)])
def test_what_others_own_and_anyone_may_change_is_refused(
    tmp_path: Path, mode: int, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(mode)
    check_directory(tmp_path)  # ours: we know what we do
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if fine:
        check_directory(tmp_path)
    else:
        with pytest.raises(OffloadError, match=r"belongs to another user .*chmod \+t"):
            check_directory(tmp_path)


def test_the_file_system_of_a_path_is_that_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    inner = tmp_path / "a b"
    inner.mkdir()
    (tmp_path / "link").symlink_to(inner)
    named = str(inner).replace(" ", r"\040")
    mounts.write_text(
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        f"28 27 0:30 / {named} rw shared:4 - xfs /dev/vdb rw\n"
        f"29 28 0:31 / {named} rw - tmpfs tmpfs rw\n"
        f"30 27 0:32 / {tmp_path}/a rw - btrfs /dev/vdc rw\n"
    )
    assert filesystem_type(tmp_path, mounts) == "ext4"
    assert filesystem_type(inner / "deeper", mounts) == "tmpfs"
    assert filesystem_type(tmp_path / "link", mounts) == "tmpfs"
    assert filesystem_type(tmp_path, tmp_path / "none") is None


def test_the_default_directory_is_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path))
    assert default_directory() == tmp_path
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path / "missing"))
    monkeypatch.setattr(directories, "check_directory", refusing(tmp_path / "missing"))
    assert default_directory() == Path("/var/tmp")
    monkeypatch.setattr(directories, "check_directory", refusing(tmp_path, Path("/var/tmp")))
    monkeypatch.setattr(directories.tempfile, "gettempdir", lambda: str(tmp_path))
    with pytest.raises(OffloadError, match=f"no default .*{tmp_path} refused; /var/tmp refused"):
        default_directory()


def refusing(*refused: Path) -> Callable[[Path], None]:
    def check(path: Path) -> None:
        if path in refused:
            raise OffloadError(f"{path} refused")

    return check


@linux
def test_measuring_a_disk_gives_rates_and_leaves_nothing(tmp_path: Path) -> None:
    before = descriptors()
    speed = measure_disk(tmp_path, seconds=0.01)
    assert all(figure > 0 for figure in speed)
    # between a slow disk and what memory itself can do
    assert 1 < speed.read_bytes_per_us < 1e5
    assert 1 < speed.write_bytes_per_us < 1e5
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OffloadError, match="seconds=0"):
        measure_disk(tmp_path, seconds=0)
    with pytest.raises(OffloadError, match="does not exist"):
        measure_disk(tmp_path / "missing")
