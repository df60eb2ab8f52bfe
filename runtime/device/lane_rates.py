"""Bytes that each lane has moved and the time it was busy, for replanning."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from offcompile.runtime.base.counters import now_ns


class Moved(NamedTuple):
    """Totals of one lane: successful moves of whole tensors, in unpacked bytes."""

    moves: int
    nbytes: int
    busy_ns: int


class LaneRates:
    """Totals by lane since the device was created. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: dict[str, Moved] = {}

    def add(self, lane: str, nbytes: int, busy_ns: int) -> None:
        with self._lock:
            moves, before, busy = self._moved.get(lane, (0, 0, 0))
            self._moved[lane] = Moved(moves + 1, before + nbytes, busy + busy_ns)

    def totals(self) -> Mapping[str, Moved]:
        with self._lock:
            return dict(self._moved)

    def timed(self, lane: str, nbytes: int, work: Callable[[], None]) -> Callable[[], None]:
        """Wrap `work`, which only moves `nbytes`, so that it is counted if it succeeds."""

        def counted() -> None:
            began_ns = now_ns()
            work()
            self.add(lane, nbytes, now_ns() - began_ns)

        return counted
