"""Watches whether runs on a card take more than their budget.

A plan knows the tensors that graphs make. It can only estimate the memory that libraries take
inside an op, and the values that a compiler keeps for later kernels. So the allocator measures the
second step of each plan; the first step also has the memory that tuning and libraries take once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from offcompile.runtime.device.streams import Streams

#: the run of each half that is measured
MEASURED_RUN = 2


class PeakWatch:
    """Watches one half of a plan.

    room_bytes: by how much memory may grow during a run; tell: called with the excess.
    """

    def __init__(self, streams: Streams, room_bytes: int, tell: Callable[[int], None]) -> None:
        self._streams, self._room_bytes, self._tell = streams, room_bytes, tell
        self._runs = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        self._runs += 1
        if self._runs != MEASURED_RUN:
            yield
            return
        self._streams.reset_peak()
        began_bytes = self._streams.memory().allocated_bytes
        yield
        grown_bytes = self._streams.memory().peak_allocated_bytes - began_bytes
        if grown_bytes > self._room_bytes:
            self._tell(grown_bytes - self._room_bytes)
