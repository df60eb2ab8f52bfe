"""Counts the bytes that moves hold on the device, and makes callers wait at the limit."""

from __future__ import annotations

import threading
from collections.abc import Callable

from offcompile.runtime.base import watchdog
from offcompile.runtime.base.counters import Tally


class InFlightLedger:
    """Bytes in flight under an optional limit; shares the mover's lock.

    Only copies out drain by themselves, so `reserve` waits only for them. Reload buffers that the
    graph holds may be freed by nobody but the waiting caller. A move larger than the limit goes
    through once nothing is left to drain.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        lock: threading.Lock,
        tally: Tally,
        staging_bytes: Callable[[], int],
    ) -> None:
        self._limit_bytes = limit_bytes
        self._lock = lock
        self._drained = threading.Condition(lock)
        self._tally = tally
        self._staging_bytes = staging_bytes
        self._moving_bytes = 0
        self._draining_bytes = 0

    @property
    def held_bytes(self) -> int:
        return self._moving_bytes + self._staging_bytes()

    def reserve(self, nbytes: int, drains: bool = True) -> bool:
        """Count `nbytes` more, after waiting for copies out to drain if the limit requires it.

        Returns True if it waited.
        """
        with self._lock:
            waited = self._must_wait(nbytes)
            watchdog.until(
                self._drained,
                lambda: not self._must_wait(nbytes),
                lambda: f"Room for {nbytes} of {self._limit_bytes} bytes in flight",
            )
            self._moving_bytes += nbytes
            if drains:
                self._draining_bytes += nbytes
            self._tally.in_flight_peak_bytes = max(
                self._tally.in_flight_peak_bytes, self.held_bytes
            )
        return waited

    def close(self) -> None:
        """Lift the limit and wake all waiters: nothing drains any more."""
        with self._lock:
            self._limit_bytes = None
            self._drained.notify_all()

    def release(self, nbytes: int, drained: bool = False) -> None:
        with self._lock:
            self.release_locked(nbytes, drained)

    def _must_wait(self, nbytes: int) -> bool:
        return bool(self._draining_bytes) and self._over(nbytes)

    def _over(self, nbytes: int) -> bool:
        return self._limit_bytes is not None and self.held_bytes + nbytes > self._limit_bytes

    def release_locked(self, nbytes: int, drained: bool = False) -> None:
        """Like `release`, for callers that already hold the lock."""
        self._moving_bytes -= nbytes
        if drained:
            self._draining_bytes -= nbytes
        self._drained.notify_all()
