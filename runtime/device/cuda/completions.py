"""Threads that wait for copies to end: one for each lane, in the order of issue."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from offcompile.runtime.base.threads import started

T = TypeVar("T")


class _CompletionLine(Generic[T]):
    def __init__(self) -> None:
        self.queue: deque[T] = deque()
        self.wake = threading.Condition()
        self.thread: threading.Thread | None = None


class Completions(Generic[T]):
    """Calls `finish` for each item on its lane's thread; `finish` blocks until the item has ended.

    Threads are daemons, start with the first item of their lane, and end with `close`.
    """

    def __init__(self, finish: Callable[[T], None]) -> None:
        self._finish = finish
        self._lock = threading.Lock()
        self._lines: dict[str, _CompletionLine[T]] = {}
        self._closed = False

    def ready(self, lane: str) -> None:
        """Start the lane's thread, before beginning any work that will be passed to `add`."""
        line = self._line(lane)
        with line.wake:
            if line.thread is not None:
                return
            line.thread = started(f"offcompile-{lane}-ends", self._run, line)

    def add(self, lane: str, item: T) -> None:
        self.ready(lane)
        line = self._line(lane)
        with line.wake:
            line.queue.append(item)
            line.wake.notify()

    def _line(self, lane: str) -> _CompletionLine[T]:
        line = self._lines.get(lane)
        if line is None:
            with self._lock:
                line = self._lines.setdefault(lane, _CompletionLine())
        return line

    def close(self) -> None:
        """Finish the added items, then end the threads. No item may be added after this."""
        self._closed = True
        for line in self._lines.values():
            with line.wake:
                line.wake.notify()
            if line.thread is not None and line.thread is not threading.current_thread():
                line.thread.join()

    def _run(self, line: _CompletionLine[T]) -> None:
        while True:
            with line.wake:
                while not line.queue:
                    if self._closed:
                        return
                    line.wake.wait()
                item = line.queue.popleft()
            self._finish(item)
            # drop the last item now, not when the next one comes
            del item
