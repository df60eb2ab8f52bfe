"""Time limits for searches: a caller with little time sets one, and long searches check it.

Searches inside policies then need no clock, and return the same answer whenever they have enough
time.
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
    #: an answer is no longer needed
    OVER = 2


class TimeIsUp(Exception):
    """Raised when a search has used up its time; results not found by then are not needed."""


def _always() -> TimeLeft:
    return TimeLeft.ENOUGH


# per context: the deadline holds for a whole search, whichever policy is at work
_clock: ContextVar[Callable[[], TimeLeft]] = ContextVar("clock", default=_always)


@contextmanager
def timed_by(clock: Callable[[], TimeLeft]) -> Iterator[None]:
    """Searches inside this context are timed by `clock`."""
    token = _clock.set(clock)
    try:
        yield
    finally:
        _clock.reset(token)


def is_short() -> bool:
    """True if a search should settle for its result. Raises `TimeIsUp` if none is needed."""
    time = _clock.get()()
    if time is TimeLeft.OVER:
        raise TimeIsUp
    return time is TimeLeft.SHORT
