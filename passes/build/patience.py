"""How long a search may go on: who has little time says so around it, what takes long asks.

So the searches inside of policies need not know of clocks, and answer the same whenever they have
the time that they want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import IntEnum


class TimeLeft(IntEnum):
    ENOUGH = 0
    #: a first answer will do, however poor
    SHORT = 1
    #: no answer is needed any more
    OVER = 2


class TimeIsUp(Exception):
    """A search has had its time; what it had not found yet is not needed."""


def _always() -> TimeLeft:
    return TimeLeft.ENOUGH


_clock: ContextVar[Callable[[], TimeLeft]] = ContextVar("clock", default=_always)


@contextmanager
def timed_by(clock: Callable[[], TimeLeft]) -> Iterator[None]:
    """Within this, searches go by `clock`."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)


def is_short() -> bool:
    """Whether to be content with what is there. Raises `TimeIsUp` where nothing is wanted."""
    time = _clock.get()()
    if time is TimeLeft.OVER:
        raise TimeIsUp
    return time is TimeLeft.SHORT
