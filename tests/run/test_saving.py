"""Checkpoints: what torch.load reads, whole or not there, without a copy in memory."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm

import offcompile
from offcompile.ir import OffloadError
from offcompile.run import saving
from offcompile.run.saving import Calls


def checkpoint(number: int) -> dict[str, object]:
    torch.manual_seed(number)
    shared = torch.randn(100)
    return {"number": number, "a": shared, "view": shared[10:20], "half": torch.ones(7).bfloat16()}


def equal(found: dict[str, object], wanted: dict[str, object]) -> bool:
    return list(found) == list(wanted) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b
        for a, b in zip(found.values(), wanted.values(), strict=True)
    )


def failing(code: int) -> Callable[..., int]:
    def call(*given: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("mapped", [False, True])
def test_torch_reads_what_was_saved(tmp_path: Path, mapped: bool) -> None:
    path = tmp_path / "model.pt"
    offcompile.save(checkpoint(1), path)
    found = torch.load(path, mmap=mapped)
    assert equal(found, checkpoint(1))
    assert found["view"].untyped_storage().data_ptr() == found["a"].untyped_storage().data_ptr()
    offcompile.save(checkpoint(2), str(path))
    assert equal(torch.load(path), checkpoint(2))
    assert os.listdir(tmp_path) == ["model.pt"]


def test_rights_and_links_are_those_that_a_write_would_leave(tmp_path: Path) -> None:
    plain, link = tmp_path / "plain.pt", tmp_path / "link.pt"
    before = os.umask(0o027)
    try:
        offcompile.save(checkpoint(1), plain)
    finally:
        os.umask(before)
    assert stat.S_IMODE(plain.stat().st_mode) == 0o640
    plain.chmod(0o604)
    link.symlink_to("plain.pt")
    offcompile.save(checkpoint(2), link)
    assert link.is_symlink() and equal(torch.load(plain), checkpoint(2))
    assert stat.S_IMODE(plain.stat().st_mode) == 0o604


def test_file_systems_without_nameless_files_serve_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_O_TMPFILE", 0)
    path = tmp_path / "model.pt"
    offcompile.save(checkpoint(1), path)
    with pytest.raises(OffloadError, match="ENOSPC"):
        saving.save(checkpoint(2), path, calls=Calls(write=failing(errno.ENOSPC)))
    assert equal(torch.load(path), checkpoint(1))
    assert os.listdir(tmp_path) == ["model.pt"]


@pytest.mark.parametrize("nameless", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_fault_at_any_call_leaves_the_old_file_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nameless: bool, first: bool
) -> None:
    if not nameless:
        monkeypatch.setattr(saving, "_O_TMPFILE", 0)
    path = tmp_path / "model.pt"
    if not first:
        offcompile.save(checkpoint(1), path)
    at, failed = 0, 0
    while True:
        number = 0

        def spoilt(real: Callable[..., object], at: int = at) -> Callable[..., object]:
            def call(*given: object) -> object:
                nonlocal number
                number += 1
                if number > at:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*given)

            return call

        calls = Calls(spoilt(os.write), spoilt(os.fsync), spoilt(os.replace))  # type: ignore[arg-type]
        try:
            saving.save(checkpoint(2), path, calls=calls)
            break
        except OffloadError as error:
            failed += 1
            assert str(path) in str(error) and "No space left" in str(error)
            if "saved and in place" in str(error):
                assert equal(torch.load(path), checkpoint(2))
            elif first:
                assert os.listdir(tmp_path) == []
            else:
                assert equal(torch.load(path), checkpoint(1))
                assert os.listdir(tmp_path) == ["model.pt"]
        at += 1
    assert failed > 10 and equal(torch.load(path), checkpoint(2))


def test_short_writes_are_gone_on_with_and_fruitless_ones_end(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    few = Calls(write=lambda descriptor, view: os.write(descriptor, view[:7]))
    saving.save(checkpoint(1), path, calls=few)
    assert equal(torch.load(path), checkpoint(1))
    with pytest.raises(OffloadError, match=r"after 0 bytes .*nothing was written in 8 tries"):
        saving.save(checkpoint(2), path, calls=Calls(write=lambda descriptor, view: 0))
    assert equal(torch.load(path), checkpoint(1))


def test_what_cannot_be_pickled_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="lambda"):
        offcompile.save({"f": lambda: 0}, tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("made", "told"),
    [
        (lambda place: place, "is a directory: give the path of a file"),
        (lambda place: place / "no" / "x.pt", r"after 0 bytes \(.*ENOENT\): create the directory"),
        (lambda place: io.BytesIO(), "needs a path, not BytesIO.*torch.save"),
    ],
)
def test_refusals(tmp_path: Path, made: Callable[[Path], object], told: str) -> None:
    with pytest.raises(OffloadError, match=told):
        offcompile.save({}, made(tmp_path))  # type: ignore[arg-type]


KILLED = """
import os, signal, sys, torch
from offcompile.run.saving import Calls, save
path, at = sys.argv[1], int(sys.argv[2])
number = 0
def fatal(real):
    def call(*given):
        global number
        number += 1
        if number > at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*given)
    return call
save({"number": 2, "a": torch.ones(1000)}, path,
     calls=Calls(fatal(os.write), fatal(os.fsync), fatal(os.replace)))
"""


def test_what_a_kill_left_is_cleared_away_by_the_next_save(tmp_path: Path) -> None:
    path, other = tmp_path / "model.pt", tmp_path / ".model.pt.0123.part"
    left, busy = tmp_path / ".model.pt.01234567.part", tmp_path / ".model.pt.89abcdef.part"
    for file in (left, busy, other):
        file.write_bytes(b"part")
    with busy.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        offcompile.save(checkpoint(1), path)
    assert not left.exists() and busy.exists() and other.exists()
    assert equal(torch.load(path), checkpoint(1))


@pytest.mark.parametrize("at", [0, 5, 1000])
def test_a_kill_leaves_the_old_file_or_the_new_one(tmp_path: Path, at: int) -> None:
    path = tmp_path / "model.pt"
    offcompile.save({"number": 1}, path)
    done = warm.run([sys.executable, "-c", KILLED, str(path), str(at)], timeout=300)
    assert done.returncode == (0 if at == 1000 else -signal.SIGKILL)
    assert torch.load(path)["number"] == (2 if at == 1000 else 1)
    assert os.listdir(tmp_path) == ["model.pt"]


BOUNDED = """
import resource, sys, torch
import offcompile
offcompile.save({"warm": torch.ones(1000)}, sys.argv[1])
big = torch.from_file(sys.argv[2], shared=True, size=16 << 20)
big.fill_(3)
data = next(int(l.split()[1]) << 10 for l in open("/proc/self/status") if l.startswith("VmData"))
resource.setrlimit(resource.RLIMIT_DATA, (data + (8 << 20),) * 2)
try:
    big.clone()
except RuntimeError:
    print("limited")
offcompile.save({"big": big, "part": big[5:]}, sys.argv[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_saving_takes_no_memory_of_the_size_of_what_is_saved(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    done = warm.run([sys.executable, "-c", BOUNDED, str(path), str(tmp_path / "big")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["limited"]
    assert torch.load(path, mmap=True)["big"][-1] == 3
