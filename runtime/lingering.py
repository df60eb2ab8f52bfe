"""Threads for work that comes and goes: they end by themselves when there was none for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from offcompile.ir import OffloadError

_LINGER_S = 0.2

Item = TypeVar("Item")


class Lingering(Generic[Item]):
    """A daemon thread, there while needed, that takes items with the lock and works without it.

    `take` is called with the condition's lock held, whenever something changed, and gives the next
    item or None; `work` must not raise.
    """

    def __init__(
        self,
        name: str,
        changed: threading.Condition,
        take: Callable[[], Item | None],
        work: Callable[[Item], None],
    ) -> None:
        self._name, self._changed = name, changed
        self._take, self._work = take, work
        self._thread: threading.Thread | None = None
        self._is_open = True

    def wake(self) -> None:
        """There may be something to take; with the lock held."""
        if self._thread is None and self._is_open:
            thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise OffloadError(
                    f"the thread {self._name} cannot be started ({error}): raise what bounds this "
                    "process (ulimit -u, ulimit -d, ulimit -s)"
                ) from error
            self._thread = thread
        self._changed.notify_all()

    def end(self) -> None:
        """Have it end after what it is at; needs no lock, and takes none."""
        self._is_open = False

    def is_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def join(self) -> None:
        """Wait until it has ended; without the lock."""
        with self._changed:
            thread = self._thread
            self._changed.notify_all()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                item = self._next()
                if item is None:
                    self._thread = None
                    return
            self._work(item)
            del item  # else the last one would be held until the next one comes

    def _next(self) -> Item | None:
        until = time.monotonic() + _LINGER_S
        while self._is_open:
            item = self._take()
            left_s = until - time.monotonic()
            if item is not None or left_s <= 0:
                return item
            self._changed.wait(left_s)
        return None
