"""Defers Ctrl-C while code changes accounts that have to agree, until they do agree.

Python may raise KeyboardInterrupt on the main thread after any call, such as after a copy has begun
and before anybody has noted it. Inside an `uninterrupted` function the signal is only noted. It is
raised at the next `check`, where a wait has lasted for `POLL_S`, or when the function has ended.
The user's own handlers are called then, too, whatever they do.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import signal
import sys
import threading
from collections.abc import Callable
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

# the same functions as in `signal`, which takes five times as long to turn handlers into an enum
_set, _get = _signal.signal, _signal.getsignal
#: a wait of the main thread checks this often for a signal
POLL_S = 0.1


class _Deferral:
    """Notes whether signals are deferred, whether one came, and its handler."""

    def __init__(self) -> None:
        self.active = self.came = False
        self.handler: Callable[[int, FrameType | None], Any] | None = None


# per process: signals are handled by its main thread alone
_deferral = _Deferral()


def uninterrupted(run: Callable[Given, Result]) -> Callable[Given, Result]:
    """Let no signal interrupt the function, except at a `check` or in a wait."""

    @wraps(run)
    def deferring(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if not _begin():
            return run(*args, **kwargs)
        try:
            return run(*args, **kwargs)
        finally:
            _end()

    return deferring


def deferred() -> bool:
    """True on the main thread inside an `uninterrupted` function: waits have to `check`."""
    return _deferral.active and threading.current_thread() is threading.main_thread()


def check() -> None:
    """Raise KeyboardInterrupt (do what the handler does) if the signal has come meanwhile."""
    if _deferral.came and deferred():
        _deliver()


def _begin() -> bool:
    """False if there is nothing to do: on other threads, inside another one, without a handler."""
    if _deferral.active or threading.current_thread() is not threading.main_thread():
        return False
    handler = _get(signal.SIGINT)
    if not callable(handler):
        return False
    _deferral.handler, _deferral.came = handler, False
    _set(signal.SIGINT, _later)
    # from here on nothing is raised between two calls
    _deferral.active = True
    return True


def _end() -> None:
    _deferral.active = False
    if _get(signal.SIGINT) is _later:  # else the function has set a handler of its own
        _set(signal.SIGINT, _deferral.handler)
    if _deferral.came:
        _deliver()


def _deliver() -> None:
    handler, _deferral.came = _deferral.handler, False
    assert handler is not None
    handler(signal.SIGINT, sys._getframe())


def _later(number: int, frame: FrameType | None) -> None:
    _deferral.came = True
