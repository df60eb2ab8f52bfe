"""Lets one run of a compiled half listen to its moves: when copies ran and when compute waited.

A run listens on the thread that it computes on; moves that this thread starts report to the same
listener when they end, on any thread. So runs of several graphs, or on several threads, never mix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offcompile.runtime.base.define import current, inside

#: a time by the listener's clock; on CUDA an event, which has a time only later
Instant = Any
_SILENT: AbstractContextManager[None] = nullcontext()


class HeardCopy(NamedTuple):
    """A copy that a lane ran."""

    move: str
    lane: str
    began: Instant
    ended: Instant


class HeardWait(NamedTuple):
    """A wait of compute for a move: before the move could begin (`starting`), or for its end."""

    move: str
    began: Instant
    ended: Instant
    starting: bool


@dataclass(eq=False, slots=True)
class MoveListener:
    """The record of one run. `now`: compute's current time; `names`: move → readable name."""

    now: Callable[[], Instant]
    names: Mapping[str, str] = field(default_factory=dict)
    copies: list[HeardCopy] = field(default_factory=list)
    waits: list[HeardWait] = field(default_factory=list)

    def waited(self, move: str, began: Instant, starting: bool = False) -> None:
        """Record that compute waited from `began` until now."""
        self.waits.append(HeardWait(move, began, self.now(), starting))

    def wait_range(self, move: str) -> AbstractContextManager[None]:
        """A named range in the profile around a wait, if a profiler runs."""
        if not profiling():
            return _SILENT
        return profiled(f"offcompile wait {self.names.get(move, move)}")


def listener() -> MoveListener | None:
    """The listener of this thread."""
    return current(MoveListener)


def listening(one: MoveListener | None) -> AbstractContextManager[None]:
    """Inside the context, `one` hears of moves and waits of this thread; None: nobody does."""
    return inside(MoveListener, one)


def profiling() -> bool:
    """True if a torch profiler is running."""
    return torch.autograd.profiler._is_profiler_enabled


def profiled(name: str) -> AbstractContextManager[Any]:
    """A named range in the profile."""
    return torch.profiler.record_function(name)
