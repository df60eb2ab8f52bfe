"""A block table: the blocks that one execution touches, in order (DeepUM, §4.2 and figure 7).

Each row names the successors of a block; `start` and `end` say where the walk starts and stops. A
row also counts how regularly its block is touched, and only regular blocks are linked. So blocks
selected by data (embedding rows, experts) are not fetched, and do not break the walk.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from .tables import BELIEVED, CERTAIN, Numbers, Sets, Shape, Successors

BlockId = Hashable


class Item(NamedTuple):
    """A block that an execution is expected to touch. `born`: only written, so never fetched."""

    block: BlockId
    nbytes: int
    born: bool


class Row:
    __slots__ = ("born", "following", "nbytes", "regular", "visit")

    def __init__(self, nbytes: int, born: bool, regular: int, visit: int) -> None:
        self.visit = visit
        self.nbytes = nbytes
        self.born = born
        self.regular = regular
        self.following: Successors[BlockId] = Successors()


class BlockTable:
    """The blocks touched by one execution, in bounded space: `begin`, `touch`…, `end_visit`."""

    def __init__(self, shape: Shape, numbers: Numbers[BlockId]) -> None:
        self.shape = shape
        self.start: BlockId | None = None
        self.end: BlockId | None = None
        self._numbers = numbers
        self._sets: Sets[BlockId, Row] = Sets(shape)
        self._visits = 0
        self._walk: tuple[Item, ...] | None = ()
        self._first: BlockId | None = None
        self._last: BlockId | None = None
        self._last_row: Row | None = None

    @property
    def table_bytes(self) -> int:
        return self._sets.table_bytes

    def begin(self) -> None:
        self._first = self._last = self._last_row = None

    def touch(self, block: BlockId, nbytes: int, born: bool) -> None:
        """Records the next block of this visit; called once per block."""
        number = self._numbers.of(block)
        row = self._sets.get(number, block)
        if row is None:
            # blocks of the first visit are believed; later ones must appear twice
            row = Row(nbytes, born, 1 if self._visits else BELIEVED, self._visits)
            self._sets.put(number, block, row)
            self._walk = None
        else:
            if row.regular < CERTAIN:
                running = row.regular >= BELIEVED or row.visit == self._visits - 1
                row.regular = row.regular + 1 if running else 1
                self._walk = None
            row.visit = self._visits
            if row.nbytes != nbytes or row.born != born:
                row.nbytes, row.born = nbytes, born
                self._walk = None
        if row.regular < BELIEVED:
            return
        if self._last_row is None:
            self._first = block
        elif self._last_row.following.saw(block, self.shape.successors):
            self._walk = None
        self._last, self._last_row = block, row

    def end_visit(self, touched: set[BlockId]) -> None:
        """Closes the visit: expected blocks that were not touched count as less regular."""
        self._visits += 1
        for item in self.items():
            if item.block not in touched:
                row = self._sets.get(self._numbers.of(item.block), item.block)
                if row is not None and row.regular:
                    row.regular -= 1
                    self._walk = None
        if (self._first, self._last) != (self.start, self.end):
            self.start, self.end = self._first, self._last
            self._walk = None

    def items(self) -> tuple[Item, ...]:
        """Returns the regular blocks from start to end, each once; cut short at a lost row."""
        if self._walk is None:
            self._walk = tuple(self._follow())
        return self._walk

    def _follow(self) -> list[Item]:
        found: list[Item] = []
        seen: set[BlockId] = set()
        block = self.start
        while block is not None and block not in seen:
            row = self._sets.get(self._numbers.of(block), block)
            if row is None:
                break
            seen.add(block)
            if row.regular >= BELIEVED:
                found.append(Item(block, row.nbytes, row.born))
            if block == self.end:
                break
            best = row.following.best()
            block = None if best is None else best.name
        return found
