"""Threads for intermittent work: they end by themselves after a while without work."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.threads import died, started

_LINGER_S = 0.2

Item = TypeVar("Item")


class IdleThread(Generic[Item]):
    """A daemon thread, alive while needed, that takes items with the lock and works without it.

    `take` is called with the condition's lock held, whenever something changed, and returns the
    next item or None; `work` must not raise. If either raises anyway, the thread ends, `failed` is
    called with the lock held, and the next `wake` starts another thread.
    """

    def __init__(
        self,
        name: str,
        changed: threading.Condition,
        take: Callable[[], Item | None],
        work: Callable[[Item], None],
        failed: Callable[[Item | None, OffloadError], None],
    ) -> None:
        self._name, self._changed = name, changed
        self._take, self._work, self._failed = take, work, failed
        self._thread: threading.Thread | None = None
        self._is_open = True

    def wake(self) -> None:
        """Note that there may be an item to take; call it with the lock held."""
        if self._thread is None and self._is_open:
            self._thread = started(self._name, self._run)
        self._changed.notify_all()

    def end(self) -> None:
        """Make the thread end after its current item; needs no lock, and takes none."""
        self._is_open = False

    def is_this_thread(self) -> bool:
        return self._thread is threading.current_thread()

    def join(self) -> bool:
        """Wait, without the lock, until the thread has ended. False if it was left behind."""
        with self._changed:
            thread = self._thread
            self._changed.notify_all()
        return thread is None or watchdog.joined(thread, lambda: f"The end of {self._name}")

    def _run(self) -> None:
        item: Item | None = None
        try:
            while True:
                with self._changed:
                    item = self._next()
                    if item is None:
                        self._thread = None
                        return
                self._work(item)
                item = None  # otherwise the last item would be held until the next one comes
        except BaseException as error:
            with self._changed:
                self._thread = None
                self._failed(item, died(self._name, error))
                self._changed.notify_all()

    def _next(self) -> Item | None:
        until = time.monotonic() + _LINGER_S
        while self._is_open:
            item = self._take()
            left_s = until - time.monotonic()
            if item is not None or left_s <= 0:
                return item
            self._changed.wait(left_s)
        return None
