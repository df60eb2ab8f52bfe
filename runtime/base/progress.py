"""Shows one line on the terminal for long work; silent if stderr is no terminal."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from offcompile.ir.units import size

#: work shorter than this shows no line
SILENT_SECONDS = 1.0
_clock = time.monotonic


class Progress:
    """`with Progress(name) as say: say("measuring 3 of 20")` shows, after a second, a line with a
    spinner, the name, the latest text and the time elapsed.

    Shown only on a terminal. A nested one hides the outer one's line. Any thread may call it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.shown = at_terminal()
        self._lock = threading.RLock()
        self._text = ""
        self._bar: Bar | None = None
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
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], description=self._said)

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
        if bar is not None:
            bar.stop()


def at_terminal() -> bool:
    """True if stderr, which may be absent or closed, is a terminal."""
    stream = sys.stderr
    return stream is not None and not stream.closed and stream.isatty()


_nesting = threading.Lock()
#: the innermost open Progress, whose line may be shown
_innermost: Progress | None = None
