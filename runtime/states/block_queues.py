"""The blocks of states that wait for a transfer, or lie in memory without being visited.

There are no locks here: `Flow` holds its own.
"""

from __future__ import annotations

from collections import deque

from .state_blocks import StateBlock


class BlockQueues:
    """The queues that blocks pass through between visits."""

    def __init__(self) -> None:
        #: to be read, since a visit waits for them
        self.demands: deque[StateBlock] = deque()
        #: in memory, for an upcoming visit
        self.ahead: list[StateBlock] = []
        #: in memory, in the order of their last visits
        self.idle: dict[StateBlock, None] = {}
        self.idle_bytes = 0
        #: to be written
        self.leaving: deque[StateBlock] = deque()

    def rest(self, block: StateBlock) -> None:
        """Add a block to the idle ones."""
        assert block.frame is not None
        self.idle[block] = None
        self.idle_bytes += block.frame.nbytes

    def remove(self, block: StateBlock) -> None:
        if block in self.idle:
            del self.idle[block]
            assert block.frame is not None
            self.idle_bytes -= block.frame.nbytes
        for queue in (self.ahead, self.demands, self.leaving):
            if block in queue:
                queue.remove(block)

    def needed_last(self, step: int) -> StateBlock:
        """The idle block needed last: the latest one of `step`, else the longest idle one."""
        latest = next(reversed(self.idle))
        return latest if latest.step == step else next(iter(self.idle))

    def clear(self) -> None:
        for queue in (self.demands, self.ahead, self.idle, self.leaving):
            queue.clear()
        self.idle_bytes = 0
