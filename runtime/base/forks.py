"""Keeps locks from being held across `os.fork`: a child has only the thread that forked."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class AtFork(Protocol):
    """An object that must be quiescent while the process forks."""

    def before_fork(self) -> None:
        """Come to rest, and stay at rest until `after_fork`."""

    def after_fork(self, in_child: bool) -> None:
        """Resume; in the child only this thread exists."""


_watched: weakref.WeakSet[AtFork] = weakref.WeakSet()
_resting: list[AtFork] = []
_forking = threading.Lock()


def watch(item: AtFork) -> None:
    """Bring `item` to rest around every fork of this process, for as long as it lives."""
    _watched.add(item)


def _before() -> None:
    # one fork at a time: two that took the same locks in different orders would deadlock
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
