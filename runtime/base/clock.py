"""How long compiled graphs take, also where they run behind the caller's back.

On the CPU the clock on the wall tells. On CUDA a call returns before its work has run: events in
the stream tell, and only later; what has ended is passed on at the next call, so that nothing
ever waits for a measurement.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

Tell = Callable[[float], None]


class Clock(ABC):
    #: whether asking costs next to nothing
    free: bool

    @abstractmethod
    def start(self) -> object:
        """Now, where the device's work stands."""

    @abstractmethod
    def between_ns(self, first: Any, last: Any) -> int | None:
        """From one `start` to another, below zero if that was before; None: not known yet."""

    @abstractmethod
    def stop(self, started: Any, tell: Tell) -> None:
        """`tell` gets the microseconds since `started`: now, or once they are known."""

    @abstractmethod
    def settle(self) -> None:
        """Pass on what is known by now."""


class WallClock(Clock):
    free = True

    def start(self) -> int:
        return time.perf_counter_ns()

    def between_ns(self, first: int, last: int) -> int:
        return last - first

    def stop(self, started: int, tell: Tell) -> None:
        tell((time.perf_counter_ns() - started) / 1e3)

    def settle(self) -> None:
        """Nothing is ever outstanding."""


class StreamClock(Clock):
    """Events in the current stream of one CUDA device.

    `event` makes one that keeps time (`torch.cuda.Event(enable_timing=True)`).
    """

    free = False

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._event = event or timed_event
        self._open: deque[tuple[Any, Any, Tell]] = deque()

    def start(self) -> object:
        return self._record()

    def between_ns(self, first: Any, last: Any) -> int | None:
        if not (first.query() and last.query()):
            return None
        elapsed_ms: float = first.elapsed_time(last)
        return round(elapsed_ms * 1e6)

    def stop(self, started: Any, tell: Tell) -> None:
        self._open.append((started, self._record(), tell))
        self.settle()

    def settle(self) -> None:
        while self._open and self._open[0][1].query():
            started, ended, tell = self._open.popleft()
            tell(started.elapsed_time(ended) * 1e3)

    def _record(self) -> Any:
        event = self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event


def timed_event() -> Any:
    """An event that keeps time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device) -> Clock:
    return StreamClock(device) if device.type == "cuda" else WallClock()
