"""Locks that `os.fork` may not find taken: a child has only the thread that forked."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class AtFork(Protocol):
    """What has to stand still while the process forks."""

    def before_fork(self) -> None:
        """Come to rest, and stay so."""

    def after_fork(self, in_child: bool) -> None:
        """Go on; the child has this thread only."""


_watched: weakref.WeakSet[AtFork] = weakref.WeakSet()
_resting: list[AtFork] = []
_forking = threading.Lock()


def watch(item: AtFork) -> None:
    """From now until it dies, `item` is brought to rest around every fork of this process."""
    _watched.add(item)


def _before() -> None:
    # one fork at a time: two that took the same locks in different orders would never end
    _forking.acquire()
    for item in list(_watched):
        item.before_fork()
        _resting.append(item)


def _after(in_child: bool) -> None:
    while _resting:
        _resting.pop().after_fork(in_child)
    _forking.release()


def _after_in_child() -> None:
    _after(in_child=True)


def _after_in_parent() -> None:
    _after(in_child=False)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
