"""Threads that begin or say why not, and what those leave behind that ended by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from offcompile.ir import OffloadError


def started(name: str, run: Callable[..., None], *args: Any) -> threading.Thread:
    """A thread that ends with the process."""
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
    """What a thread that ended by itself leaves to who waits for its work."""
    # not as its cause: those who tell of failures tell of the cause alone
    return OffloadError(
        f"the thread {name} died of {type(error).__name__} ({error}); another takes its place for "
        "what comes. Unless the process was out of memory this is a defect: please report it"
    )


def bare(error: BaseException) -> BaseException:
    """The error without its frames: they would keep tensors alive."""
    seen: BaseException | None = error
    while seen is not None:
        seen.__traceback__ = None
        seen = seen.__cause__ or seen.__context__
    return error
