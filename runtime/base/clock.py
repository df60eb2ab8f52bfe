"""Measures how long compiled graphs take, including those that run asynchronously.

The CPU uses the wall clock. A GPU's call returns before its work has run, so events in the stream
measure it, and their times are known only later. Each call reports the measurements that have
finished by then, so nothing ever waits for one.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

Tell = Callable[[float], None]


class StepClock(ABC):
    #: True if reading the clock costs next to nothing
    free: bool

    @abstractmethod
    def start(self) -> object:
        """Returns a mark of the present point in the device's work."""

    @abstractmethod
    def between_ns(self, first: Any, last: Any) -> int | None:
        """Returns the time between two `start` marks: negative if `last` came first, None if it
        is not known yet."""

    @abstractmethod
    def stop(self, started: Any, tell: Tell) -> None:
        """Call `tell` with the microseconds since `started`, now or once they are known."""

    @abstractmethod
    def settle(self) -> None:
        """Report the measurements that are known by now."""


class WallClock(StepClock):
    free = True

    def start(self) -> int:
        return time.perf_counter_ns()

    def between_ns(self, first: int, last: int) -> int:
        return last - first

    def stop(self, started: int, tell: Tell) -> None:
        tell((time.perf_counter_ns() - started) / 1e3)

    def settle(self) -> None:
        """Do nothing: no measurement is ever outstanding."""


class StreamClock(StepClock):
    """Measures with events in the current stream of one device.

    `event` creates a timing event; None: the device's own (`torch.cuda.Event`).
    """

    free = False

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._event = event or partial(self._module.Event, enable_timing=True)
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
        event.record(self._module.current_stream(self._device))
        return event


def timed_event() -> Any:
    """Create an event of CUDA with timing enabled."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def clock_for(device: torch.device) -> StepClock:
    return WallClock() if device.type == "cpu" else StreamClock(device)
