"""Shows one line for long work, on a terminal or in a notebook's cell; silent anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from sys import modules
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from offcompile.ir.units import size

#: work shorter than this shows no line
SILENT_SECONDS = 1.0
#: a notebook's line is written anew so often
CELL_SECONDS = 0.5
_clock = time.monotonic


class Progress:
    """`with Progress(name) as say: say("measuring 3 of 20")` shows, after a second, a line with a
    spinner, the name, the latest text and the time elapsed.

    Shown only on a terminal and in a notebook. A nested one hides the outer one's line. Any thread
    may call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._display = cell_display()
        self.shown = self._display is not None or at_terminal()
        self._lock = threading.RLock()
        self._text = ""
        self._bar: Bar | CellLine | None = None
        self._last = ""
        self._timer: threading.Timer | None = None
        self._outer: Progress | None = None
        self._time = 0.0
        self._over = False

    def __enter__(self) -> Progress:
        global _innermost
        if self.shown:
            self._time = _clock()
            with _nesting:
                self._outer, _innermost = _innermost, self
                if self._outer is not None:
                    self._outer._hide()
            self._show_later()
        return self

    def __call__(self, text: str) -> None:
        with self._lock:
            self._text = text
            if isinstance(self._bar, Bar):
                self._bar.update(self._bar.task_ids[0], description=self._said)
            elif self._bar is not None:
                self._bar.text = self._said

    def becomes(self, text: str) -> None:
        """Leave this line in a notebook's cell at the end, if one was shown. A terminal's goes."""
        self._last = text

    def bytes_done(self, done: int, total: int | None = None) -> None:
        """Show how many bytes are done, out of how many, and the rate so far."""
        if not self.shown:
            return
        seconds = max(_clock() - self._time, 1e-9)
        of = "" if total is None else f" of {size(total)} ({done / max(total, 1):.0%})"
        self(f"{size(done)}{of}, {size(round(done / seconds))}/s")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _innermost
        if not self.shown:
            return
        self._over = True
        self._hide()
        with _nesting:
            if _innermost is self:
                _innermost = self._outer
                if self._outer is not None:
                    self._outer._show_later()

    # --- the line ---------------------------------------------------------------------------

    @property
    def _said(self) -> str:
        return f"offcompile {self.name}: {self._text}" if self._text else f"offcompile {self.name}"

    def _show_later(self) -> None:
        left = SILENT_SECONDS - (_clock() - self._time)
        with self._lock:
            if self._over:  # on another thread it may end before a nested one
                return
            self._timer = threading.Timer(max(left, 0.0), self._show)
            self._timer.daemon = True
            self._timer.start()

    def _show(self) -> None:
        with self._lock:
            if self._timer is None or self._bar is not None:
                return
            if self._display is not None:
                self._bar = CellLine(self._display, self._said, self._time)
                return
            self._bar = Bar(
                SpinnerColumn(),
                TextColumn("{task.description}", markup=False),
                TimeElapsedColumn(),
                console=Console(file=sys.stderr),
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                get_time=_clock,
            )
            self._bar.add_task(self._said, total=None)
            self._bar.tasks[0].start_time = self._time
            self._bar.start()

    def _hide(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
            bar, self._bar = self._bar, None
        if timer is not None:
            timer.cancel()
        if isinstance(bar, CellLine):
            bar.stop(f"offcompile: {self._last}" if self._over and self._last else "")
        elif bar is not None:
            bar.stop()


class CellLine:
    """A line in the output of a notebook's cell, kept up to date by a thread until `stop`."""

    def __init__(self, display: Callable[..., Any], text: str, since_s: float) -> None:
        self.text = text
        self._since_s = since_s
        self._over = threading.Event()
        self._handle = display(_plain(self._line), raw=True, display_id=True)
        thread = threading.Thread(target=self._keep, name="offcompile-progress", daemon=True)
        thread.start()

    @property
    def _line(self) -> str:
        minutes, seconds = divmod(int(_clock() - self._since_s), 60)
        return f"{self.text} … {minutes}:{seconds:02}"

    def _keep(self) -> None:
        while not self._over.wait(CELL_SECONDS):
            self._write(self._line)

    def _write(self, text: str) -> None:
        with suppress(Exception):  # the notebook may be gone; the work goes on
            self._handle.update(_plain(text), raw=True)

    def stop(self, last: str) -> None:
        """Write the last text, or nothing, in place of the line."""
        self._over.set()
        self._write(last)


def _plain(text: str) -> dict[str, str]:
    return {"text/plain": text}


def cell_display() -> Callable[..., Any] | None:
    """IPython's `display` if this code runs in a notebook's cell; does not import IPython."""
    ipython = modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if ipython is None or not hasattr(shell, "kernel"):
        return None
    display: Callable[..., Any] = ipython.display.display
    return display


def at_terminal() -> bool:
    """True if stderr, which may be absent or closed, is a terminal."""
    stream = sys.stderr
    return stream is not None and not stream.closed and stream.isatty()


_nesting = threading.Lock()
#: the innermost open Progress, whose line may be shown
_innermost: Progress | None = None
