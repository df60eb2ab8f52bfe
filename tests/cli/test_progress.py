"""Long work shows its progress: on a terminal, after a while, one line at a time."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import offcompile
from offcompile.runtime.base import progress
from offcompile.runtime.base.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def said(self) -> str:
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())


class Timers:
    """In place of threads that wait: all that are due fire when `fire` is called."""

    def __init__(self) -> None:
        self.waiting: list[Timer] = []

    def fire(self) -> None:
        for timer in self.waiting[:]:
            self.waiting.remove(timer)
            timer.function()


class Timer:
    def __init__(self, timers: Timers, function: object) -> None:
        self.timers, self.daemon = timers, False
        assert callable(function)
        self.function = function

    def start(self) -> None:
        assert self.daemon
        self.timers.waiting.append(self)

    def cancel(self) -> None:
        if self in self.timers.waiting:
            self.timers.waiting.remove(self)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    made = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=made))
    return made


@pytest.fixture
def timers(monkeypatch: pytest.MonkeyPatch) -> Timers:
    made = Timers()
    monkeypatch.setattr(
        progress.threading, "Timer", lambda seconds, function: Timer(made, function)
    )
    return made


def test_nothing_is_shown_off_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    with Progress("graph 0") as say:
        say("planning")
        say.bytes_done(1)
        assert threading.active_count() == threads
    assert not say.shown and capsys.readouterr().err == ""


def test_short_work_is_silent(terminal: Terminal, timers: Timers) -> None:
    with Progress("graph 0") as say:
        say("planning")
    assert terminal.getvalue() == "" and not timers.waiting


def test_long_work_says_its_name_what_goes_on_and_the_time(
    terminal: Terminal, timers: Timers
) -> None:
    with Progress("graph 0") as say:
        say("measuring ops: 3 of 20 (mm)")
        timers.fire()
        assert "offcompile graph 0: measuring ops: 3 of 20 (mm) 0:00:0" in terminal.said()
        say("planning")
        assert say._bar is not None
        say._bar.refresh()
        assert "offcompile graph 0: planning" in terminal.said()
    assert say._bar is None


def test_what_is_within_takes_the_line_and_gives_it_back(
    terminal: Terminal, timers: Timers
) -> None:
    with Progress("compiling") as outer:
        outer("forward")
        timers.fire()
        assert outer._bar is not None
        with Progress("graph 0") as inner:
            assert outer._bar is None
            timers.fire()
            assert inner._bar is not None and outer._bar is None
        timers.fire()
        assert inner._bar is None and outer._bar is not None
    assert outer._bar is None and not timers.waiting and progress._innermost is None


def test_a_failure_takes_the_line_away(terminal: Terminal, timers: Timers) -> None:
    with pytest.raises(ValueError, match="planted"), Progress("graph 0") as say:
        timers.fire()
        raise ValueError("planted")
    assert say._bar is None and progress._innermost is None


def test_bytes_have_a_share_and_a_rate(
    terminal: Terminal, timers: Timers, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "_clock", lambda: now[0])
    with Progress("load_weights") as say:
        now[0] += 2.0
        say.bytes_done(3 << 30, 4 << 30)
        assert say._text == "3.00 GiB of 4.00 GiB (75%), 1.50 GiB/s"
        say.bytes_done(3 << 20)
        assert say._text == "3.00 MiB, 1.50 MiB/s"


class Heard:
    """In place of Progress: what was said, by name."""

    said: list[str]

    @classmethod
    def listen(cls, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        found: list[str] = []

        def say(progress: Progress, text: str) -> None:
            found.append(f"{progress.name}: {text}")

        monkeypatch.setattr(Progress, "__call__", say)
        return found


def test_loading_and_host_init_tell_how_far_they_are(
    terminal: Terminal, timers: Timers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    heard = Heard.listen(monkeypatch)
    with offcompile.host_init("cpu", spill=tmp_path):
        model = nn.Linear(256, 256)
    assert [line.partition(",")[0] for line in heard] == [
        "host_init: 256.00 KiB",
        "host_init: 257.00 KiB",
    ]
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    heard.clear()
    offcompile.load_weights(model, tmp_path / "weights.pt")
    assert [line.partition(",")[0] for line in heard] == [
        "load_weights: 0 B of 257.00 KiB (0%)",
        "load_weights: 256.00 KiB of 257.00 KiB (100%)",
    ]


@pytest.mark.long
def test_compiling_and_measuring_tell_what_goes_on(
    terminal: Terminal, timers: Timers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from offcompile.machine import target
    from offcompile.machine.hardware import load_profile

    heard = Heard.listen(monkeypatch)
    asked = []

    def measured(directories: object, tell: object) -> object:
        assert callable(tell)
        tell("matrix products")
        asked.append(directories)
        return load_profile("cpu")

    monkeypatch.setattr(target, "this_machine", lambda d, progress: measured(d, progress))
    torch._dynamo.reset()
    options = {"spill": tmp_path, "memory": "1GiB", "lowering": "inductor"}
    run = torch.compile(nn.Linear(8, 8), backend="offcompile", options=options)
    run(torch.randn(4, 8)).sum().backward()
    assert "this machine: matrix products" in heard
    assert [line.split()[:2] for line in heard if line.startswith("compiling")] == [
        ["compiling:", "forward"],
        ["compiling:", "backward"],
    ]
    assert len(asked) == 1
