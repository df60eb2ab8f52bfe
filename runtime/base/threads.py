"""Starts threads, with clear errors if they cannot start or if they die."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from offcompile.ir import OffloadError


def started(name: str, run: Callable[..., None], *args: Any) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=run, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OffloadError(
            f"the thread {name} cannot be started ({error}): raise what bounds this process "
            "(ulimit -u, ulimit -d, ulimit -s)"
        ) from error
    return thread


def died(name: str, error: BaseException) -> OffloadError:
    """Returns the error for callers that wait for the work of a thread that died."""
    # `error` is not set as the cause: code that reports failures reports only the cause
    return OffloadError(
        f"the thread {name} died of {type(error).__name__} ({error}); another takes its place for "
        "what comes. Unless the process was out of memory this is a defect: please report it"
    )


def bare(error: BaseException) -> BaseException:
    """Strip the tracebacks from the error: their frames would keep tensors alive."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
