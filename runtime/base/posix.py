"""Parts of POSIX that macOS or Windows lack, locks that no fork may catch, and files that are
replaced whole.

Plans for named hardware can be made on any system. Training needs Linux, and is refused elsewhere
before it reaches the missing parts (`offcompile.run.backend`).
"""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import fcntl
    import resource
else:
    try:
        import fcntl
        import resource
    except ImportError:
        fcntl: Any = None
        resource: Any = None

__all__ = ["AtFork", "fcntl", "replace_text", "resource", "usable_cores", "watch"]


def usable_cores() -> int:
    """Returns the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def replace_text(path: Path, text: str) -> None:
    """Write a file of this user's in its folder, which is made: readers find the old text or the
    new one, and an OSError leaves the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.stem}-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


class AtFork(Protocol):
    """An object that must be quiescent while the process forks."""

    def before_fork(self) -> None:
        """Come to rest, and stay at rest until `after_fork`."""

    def after_fork(self, in_child: bool) -> None:
        """Resume; in the child only this thread exists."""


class _Forks:
    """The objects that rest around every fork of the process: a child has only the thread that
    forked, and would find their locks held."""

    def __init__(self) -> None:
        self.watched: weakref.WeakSet[AtFork] = weakref.WeakSet()
        self._resting: list[AtFork] = []
        self._forking = threading.Lock()

    def before(self) -> None:
        # one fork at a time: two that took the same locks in different orders would deadlock
        self._forking.acquire()
        for item in list(self.watched):
            item.before_fork()
            self._resting.append(item)

    def after(self, in_child: bool) -> None:
        while self._resting:
            self._resting.pop().after_fork(in_child)
        self._forking.release()


# per process, as the operating system's fork handlers are
_forks = _Forks()


def watch(item: AtFork) -> None:
    """Bring `item` to rest around every fork of this process, for as long as it lives."""
    _forks.watched.add(item)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_forks.before,
        after_in_parent=partial(_forks.after, in_child=False),
        after_in_child=partial(_forks.after, in_child=True),
    )
