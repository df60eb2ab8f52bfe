"""Forecasts the room that the next execution leaves to saved tensors."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

#: most executions noted; the oldest are dropped first
MOST_NOTED = 65536


class _LastRun(NamedTuple):
    """An execution's last run."""

    room_bytes: int
    backward: bool
    counts_own: bool
    #: growth of the room until the next execution of the same phase
    grows_bytes: int = 0


class RoomForecast:
    """The room that each execution leaves, and how it changes behind it.

    Most of the change is an execution's own doing: gradients that it makes, tensors that it leaves.
    So it is noted by execution, and holds in whatever order they come.
    """

    def __init__(self) -> None:
        self._seen: dict[Hashable, _LastRun] = {}
        self._now: Hashable = None

    def enter(
        self, execution: Hashable, room_bytes: int, backward: bool, counts_own: bool, begins: bool
    ) -> None:
        """Note an execution that leaves `room_bytes`; `counts_own`: beside the tensors that it
        saves or reads itself. begins: it is the first of a step."""
        before = self._seen.get(self._now)
        if before is not None and before.backward == backward and not begins:
            grows = room_bytes - before.room_bytes
            self._seen[self._now] = before._replace(grows_bytes=grows)
        seen = self._seen.pop(execution, None)
        grows = 0 if seen is None else seen.grows_bytes
        self._seen[execution] = _LastRun(room_bytes, backward, counts_own, grows)
        self._now = execution
        if len(self._seen) > MOST_NOTED:
            del self._seen[next(iter(self._seen))]

    def after(self, following: Hashable | None, reads_bytes: int) -> int:
        """The room behind the execution that ran last, if the following one, which may be unknown,
        reads so much."""
        last, next_one = self._seen[self._now], self._seen.get(following)
        own = reads_bytes if next_one is not None and next_one.counts_own else 0
        if next_one is not None and next_one.backward != last.backward:
            return next_one.room_bytes + own  # the turn: that of the last time
        return max(0, last.room_bytes + last.grows_bytes) + own
