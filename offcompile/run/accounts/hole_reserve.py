"""Learns how much of a budget the keeper has to leave to holes, and to what no account knows.

A process holds its tensors and the holes between them. Where both together reach the budget, the
pages of all free blocks go back to the system and are touched again, which takes time. The size of
holes depends on the program, and no plan knows it. So the reserve begins large, and shrinks by the
bytes that repeated steps were seen to leave free. It grows again if pages then go back in every
step. Once the blocks of a step have places (`BlockPlaces`), little is left to holes.

The process also holds memory that belongs to no graph: gradients and results of eager ops, objects
made while graphs were compiled. Each step measures how much the process has gained since its first
graph beyond all accounts. From the next step on, the heap keeps that much free, and a margin, and
the reserve is never smaller.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

#: share of the memory seen free that the reserve gives up at once: footprints grow with what fills
#: it, and not only by that
GIVEN_UP = 1 / 2
#: smallest share of the budget by which the reserve is changed
WORTH = 1 / 64
#: share of the budget that is kept free beside what is unknown: the measure misses weights of eager
#: modules, which were there before the first graph
MARGIN = 1 / 32
#: share of the budget that is left to holes while blocks have places: layouts have some, and blocks
#: that find their place taken lie elsewhere
PLACED = 1 / 16
#: largest share of the budget that may be lost to what no account knows
MOST_UNKNOWN = 1 / 8
#: steps that are looked at together, because steps of different lengths may follow one another
RECENT_STEPS = 4
#: consecutive steps in which pages went back, after which the reserve grows again
TOO_MANY = 2


@dataclass(eq=False)
class HoleReserve:
    """The reserve of one budget. `nbytes`: bytes to leave now to holes and to the unknown."""

    budget_bytes: int
    nbytes: int
    #: bytes that the process held when its first graph was compiled, its weights included
    first_bytes: int = 0
    #: bytes that it reserves at first
    most_bytes: int = field(init=False)
    #: most held beyond all accounts in recent steps
    unknown_bytes: int = 0
    #: reserves with which no pages went back, the smallest last
    _enough_bytes: list[int] = field(default_factory=list)
    #: True once a smaller reserve has been seen to be too small
    _settled: bool = False
    #: steps one after the other in which pages went back
    _in_a_row: int = 0
    _trims: int = 0
    #: recent steps' bytes left, less the growth of rooms since, and bytes unknown
    _lefts: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _unknowns: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    #: the running step's least left, most unknown, and if any of it is a backward
    _left_bytes: float = float("inf")
    _unknown_bytes: int = 0
    _has_returned: bool = False

    def __post_init__(self) -> None:
        self.most_bytes = self.nbytes

    def ran(
        self, left_bytes: float, resident_bytes: int, weight_bytes: int, backward: bool
    ) -> None:
        """Note the end of an execution.

        left_bytes: of the budget by the heap's account, besides what is to stay free.
        resident_bytes: what the process holds, `weight_bytes` of it in weights, as at first.
        """
        self._has_returned |= backward
        gained = resident_bytes - self.first_bytes + weight_bytes
        accounted = self.budget_bytes - self.free_bytes - left_bytes
        self._left_bytes = min(self._left_bytes, left_bytes)
        self._unknown_bytes = max(self._unknown_bytes, int(gained - accounted))

    def step_over(self, trims: int, unused_bytes: int = 0, placed: bool = False) -> int:
        """Note the end of a step. Returns the bytes by which the reserve has shrunk, below 0 if it
        has grown.

        placed: True if blocks have places, between which there are no holes. trims: how often pages
        have gone back so far. unused_bytes: those given up that no tensor fills yet, though some
        will once the step is planned again.
        """
        left, unknown = self._left_bytes - unused_bytes, self._unknown_bytes
        whole = self._has_returned
        self._left_bytes, self._unknown_bytes, self._has_returned = float("inf"), 0, False
        trimmed, self._trims = trims > self._trims, trims
        if not whole:
            return 0
        self._lefts.append(left)
        self._unknowns.append(min(unknown, int(self.budget_bytes * MOST_UNKNOWN)))
        before, free = self.nbytes, self.free_bytes
        self.unknown_bytes = max(self._unknowns)
        enough_bytes = self.free_bytes + int(self.budget_bytes * PLACED)
        if placed and self.nbytes > enough_bytes:
            self._enough_bytes.append(self.nbytes)  # should blocks lose their places
            self.nbytes = enough_bytes
        elif not placed:
            self._adjust(trimmed, min(self._lefts) + free - self.free_bytes)
        self.nbytes = max(self.nbytes, min(self.free_bytes, self.most_bytes))
        less = before - self.nbytes
        self._lefts = deque((n - less + free - self.free_bytes for n in self._lefts), RECENT_STEPS)
        return less

    def _adjust(self, trimmed: bool, left_bytes: float) -> None:
        self._in_a_row = self._in_a_row + 1 if trimmed else 0
        if self._in_a_row >= TOO_MANY and self._enough_bytes:
            self._settled, self._in_a_row = True, 0
            missing = self._enough_bytes[-1] - self.nbytes
            if missing > 2 * self._worth_bytes:
                self.nbytes += missing // 2
            else:
                self.nbytes = self._enough_bytes.pop()
        elif not trimmed and not self._settled:
            less = min(self.nbytes - self.free_bytes, int(left_bytes * GIVEN_UP))
            if less >= self._worth_bytes:
                self._enough_bytes.append(self.nbytes)
                self.nbytes -= less

    @property
    def free_bytes(self) -> int:
        """The bytes of the budget that neither tensors nor holes may fill; 0 where none form."""
        if not self.most_bytes:
            return 0
        return int(self.budget_bytes * MARGIN) + self.unknown_bytes

    @property
    def _worth_bytes(self) -> int:
        return int(self.budget_bytes * WORTH)
