"""Hearing from the moves of one run of a compiled half when they were made, and who waited.

A run listens on the thread that it computes on; what that thread starts tells the same listener
when it ends, on whatever thread. So runs of several graphs, and on several threads, never mix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

#: a time by the listener's clock: on CUDA an event, which tells only later
Instant = Any
_SILENT: AbstractContextManager[None] = nullcontext()


class HeardCopy(NamedTuple):
    """A lane worked on a move."""

    move: str
    lane: str
    began: Instant
    ended: Instant


class HeardWait(NamedTuple):
    """Compute stood still for a move: before it could begin (`starting`), or for its end."""

    move: str
    began: Instant
    ended: Instant
    starting: bool


@dataclass(eq=False, slots=True)
class MoveListener:
    """What one run has been told. `now`: where compute stands; `names`: move → for people."""

    now: Callable[[], Instant]
    names: Mapping[str, str] = field(default_factory=dict)
    copies: list[HeardCopy] = field(default_factory=list)
    waits: list[HeardWait] = field(default_factory=list)

    def waited(self, move: str, began: Instant, starting: bool = False) -> None:
        """Compute stood still from `began` until now."""
        self.waits.append(HeardWait(move, began, self.now(), starting))

    def wait_range(self, move: str) -> AbstractContextManager[None]:
        """Around a wait: a range in the profile, where a profiler runs."""
        if not profiling():
            return _SILENT
        return profiled(f"offcompile wait {self.names.get(move, move)}")


_here = threading.local()


def listener() -> MoveListener | None:
    """Who listens on this thread."""
    found: MoveListener | None = getattr(_here, "listener", None)
    return found


@contextmanager
def listening(one: MoveListener | None) -> Iterator[None]:
    """Inside, `one` hears of what this thread starts and waits for; None: nobody does."""
    outer = listener()
    _here.listener = one
    try:
        yield
    finally:
        _here.listener = outer


def profiling() -> bool:
    """Whether a profiler of torch's runs now."""
    return torch.autograd.profiler._is_profiler_enabled


def profiled(name: str) -> AbstractContextManager[Any]:
    """A named range in the profile."""
    return torch.profiler.record_function(name)
