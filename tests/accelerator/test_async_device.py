"""The asynchronous device by itself: order, memory, and what a missing wait does."""

from __future__ import annotations

import signal
from pathlib import Path

import async_device
import pytest
from async_device import build
from async_own_checks import OF_THE_DEVICE
from async_runs import ROOT, child, needs_the_device, run_checks


@needs_the_device
def test_it_runs_behind_the_host_in_stream_order() -> None:
    run_checks(*(check.__name__ for check in OF_THE_DEVICE))


@needs_the_device
def test_the_host_cannot_read_its_memory() -> None:
    done = child([str(ROOT / "tests" / "support" / "async_child.py"), "touched_by_the_host"])
    assert done.returncode == -signal.SIGSEGV
    assert done.stdout.splitlines() == ["alive"]


@needs_the_device
def test_it_is_built_once() -> None:
    first = async_device.library()
    built = first.stat().st_mtime_ns
    assert async_device.library() == first and first.stat().st_mtime_ns == built


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "none"))
    monkeypatch.setattr(build.sys, "platform", "linux")
    assert "no C++ compiler" in str(build.why_not())
    with pytest.raises(async_device.NoCompiler, match="no C\\+\\+ compiler"):
        async_device.library()
