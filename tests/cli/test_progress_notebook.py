"""Long work shows one line in a notebook's cell, which vanishes or becomes a summary."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_progress import Timers, timers  # noqa: F401
from torch import nn

from offcompile.runtime.base import progress
from offcompile.runtime.base.progress import CellLine, Progress


class Cell:
    """In place of IPython's display: the texts that the cell's outputs have had."""

    def __init__(self) -> None:
        self.outputs: list[list[str]] = []

    def __call__(self, data: dict[str, str], raw: bool, display_id: bool) -> Any:
        assert raw and display_id
        output = [data["text/plain"]]
        self.outputs.append(output)
        return SimpleNamespace(update=lambda data, raw: output.append(data["text/plain"]))

    @property
    def now(self) -> list[str]:
        return [output[-1] for output in self.outputs if output[-1]]


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    made = Cell()
    shell = SimpleNamespace(kernel=object())
    ipython = SimpleNamespace(
        get_ipython=lambda: shell, display=SimpleNamespace(display=made), shell=shell
    )
    monkeypatch.setitem(progress.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setattr(progress, "CELL_SECONDS", 3600.0)
    return made


def test_a_line_is_kept_up_to_date_and_vanishes(
    cell: Cell,
    timers: Timers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress, "_clock", lambda: now[0])
    with Progress("graph 0") as say:
        say("planning")
        assert cell.outputs == []
        timers.fire()
        assert cell.now == ["offcompile graph 0: planning … 0:00"]
        now[0] += 72
        say("best 12 ms")
        assert isinstance(say._bar, CellLine)
        say._bar._write(say._bar._line)
        assert cell.now == ["offcompile graph 0: best 12 ms … 1:12"]
        with Progress("compiling") as inner:
            assert cell.now == []
            timers.fire()
            inner("forward")
            assert cell.now == ["offcompile compiling … 0:00"]
        timers.fire()
        assert cell.now == ["offcompile graph 0: best 12 ms … 1:12"]
    assert cell.now == []
    assert not [t for t in threading.enumerate() if t.name == "offcompile-progress" and _lives(t)]


def _lives(thread: threading.Thread) -> bool:
    thread.join(5)
    return thread.is_alive()


def test_short_work_shows_nothing_and_long_work_becomes_its_summary(
    cell: Cell,
    timers: Timers,  # noqa: F811
) -> None:
    with Progress("graph 0") as say:
        say.becomes("done")
    assert cell.outputs == []
    with Progress("graph 1") as say:
        timers.fire()
        say.becomes("graph 1: as planned")
    assert cell.now == ["offcompile: graph 1: as planned"]
    with pytest.raises(KeyboardInterrupt), Progress("graph 2"):
        timers.fire()
        raise KeyboardInterrupt
    assert cell.now == ["offcompile: graph 1: as planned"]


def test_a_notebook_that_is_gone_does_not_end_the_work(
    cell: Cell,
    timers: Timers,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gone(*given: Any, **named: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(Cell, "__call__", lambda *given, **named: SimpleNamespace(update=gone))
    with Progress("graph 0") as say:
        timers.fire()
        say("planning")


def test_the_first_call_of_a_compiled_model_ends_as_the_plans_summary(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows: Callable[[Progress], None] = Progress._show

    def at_once(self: Progress) -> None:
        self._timer = threading.Timer(0, lambda: None)
        shows(self)

    monkeypatch.setattr(Progress, "_show_later", at_once)
    torch._dynamo.reset()
    options = {"memory": "1GiB", "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.1}
    run = torch.compile(nn.Linear(8, 8), backend="offcompile", options=options)
    run(torch.randn(4, 8)).sum().backward()
    (line,) = cell.now
    assert line.startswith("offcompile: graph ") and "1.00 GiB" in line
