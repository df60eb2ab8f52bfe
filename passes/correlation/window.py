"""What is on the device, and when each block is expected next: the order of coming and going.

The window is the chain of executions expected from here on, with their blocks. Walking it gives
what to fetch. What nothing expects leaves first, least recently used first, then what is expected
last; but a block chosen by data, which no table can expect, is taken to come again after as long
as it has been unused, and is not given up for something needed later than that. Fetching stops
where only a block that is needed sooner could make room: so the lookahead is bounded by bytes as
well as by executions (DeepUM bounds it by executions alone).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from .blocks import BlockId, Item

#: when a block is expected: position of the execution, place within it
Due = tuple[int, int]


#: orders of leaving: what is expected, what would be if it came soon, and what cannot be
EXPECTED, REGULAR, IRREGULAR = RANKS = (0, 1, 2)
FAR = 1 << 60
#: for how many executions ahead room is made for births: they need no copy, and much dies before
BIRTHS_AHEAD = 2
#: place in the order of leaving (two figures and a tie-break), and the block
_Rank = tuple[int, int, int, BlockId]


class Wanted(NamedTuple):
    """A block that an execution ahead needs. `born`: it needs room there, and no copy."""

    block: BlockId
    nbytes: int
    execution: Hashable
    due: Due
    born: bool


class Victim(NamedTuple):
    """A block to let go. With `write_back` its bytes must be copied out first."""

    block: BlockId
    nbytes: int
    write_back: bool


class Held:
    """A block on the device, or on its way in."""

    __slots__ = (
        "arriving",
        "dirty",
        "leaving",
        "nbytes",
        "prefetched",
        "push",
        "regular",
        "stamp",
        "used_at",
    )

    def __init__(self, nbytes: int, arriving: bool, prefetched: bool) -> None:
        self.nbytes = nbytes
        self.stamp = 0
        self.used_at = 0
        #: whether its last use was expected
        self.regular = prefetched
        #: which of its entries in the order of leaving counts
        self.push = 0
        self.arriving = arriving
        self.prefetched = prefetched
        self.dirty = False
        self.leaving = False


class Window:
    """Residency beside expectation. Every call costs about the logarithm of what is held."""

    def __init__(self, as_printed: bool = False) -> None:
        #: as in the paper, age counts from the last move in, and orders what is expected, too
        self.as_printed = as_printed
        self.held: dict[BlockId, Held] = {}
        #: blocks that hold nothing until they are written
        self.void: dict[BlockId, None] = {}
        #: blocks in use now: they never go
        self.busy: set[BlockId] = set()
        self.chain: deque[tuple[Hashable, Sequence[Item]]] = deque()
        #: the position of the chain's first execution
        self.position = 0
        self._due: dict[BlockId, deque[Due]] = {}
        self._ticks = 0
        self._cursor: Due = (0, 0)
        self._ranks: tuple[list[_Rank], ...] = ([], [], [])
        self._pushes = 0

    # ---- expectation ---------------------------------------------------------------------

    def expect(self, execution: Hashable, items: Sequence[Item]) -> None:
        """Lengthen the chain by one execution."""
        position = self.position + len(self.chain)
        self.chain.append((execution, items))
        for place, item in enumerate(items):
            dues = self._due.setdefault(item.block, deque())
            dues.append((position, place))
            if len(dues) == 1:
                self._rank(item.block)

    def advance(self) -> None:
        """The first execution of the chain is over."""
        position = self.position
        self.position += 1
        if self.chain:
            _, items = self.chain.popleft()
            for item in items:
                dues = self._due[item.block]
                dues.popleft()
                if not dues:
                    del self._due[item.block]
                self._rank(item.block)
        if self._cursor <= (position + 1, 0):
            self._cursor = (position + 1, 0)

    def forget(self) -> None:
        """Nothing is expected any more."""
        expected, self._due = self._due, {}
        self.chain.clear()
        self._cursor = (self.position, 0)
        for block in expected:
            self._rank(block)

    def due(self, block: BlockId) -> Due | None:
        """When the block is expected next."""
        dues = self._due.get(block)
        return dues[0] if dues else None

    # ---- residency -----------------------------------------------------------------------

    def hold(self, block: BlockId, nbytes: int, arriving: bool, prefetched: bool) -> None:
        """The block takes its bytes on the device from now on."""
        self.void.pop(block, None)
        self.held[block] = held = Held(nbytes, arriving, prefetched)
        self._mark(block, held)

    def use(self, block: BlockId) -> None:
        """The block is in use until `busy` is cleared; it no longer leaves if it was about to."""
        held = self.held[block]
        held.leaving = held.prefetched = False
        self.busy.add(block)
        if not self.as_printed:
            self._mark(block, held)

    def _mark(self, block: BlockId, held: Held) -> None:
        self._ticks += 1
        held.stamp, held.used_at = self._ticks, self.position
        due = self.due(block)
        if not held.prefetched:
            held.regular = due is not None and due[0] == self.position
        self._rank(block)

    def release(self, block: BlockId) -> Held:
        """The block's bytes are free again."""
        held = self.held.pop(block)
        self.busy.discard(block)
        due = self.due(block)
        if due is not None and due < self._cursor:
            self._cursor = due
        return held

    # ---- what to fetch ---------------------------------------------------------------------

    def walk(self, free_bytes: int) -> Iterator[tuple[Wanted, bool]]:
        """What is needed next and not there, each with whether it fits beside the rest: blocks to
        be born soon, then what is to be fetched, in order. Ends after the first that does not fit.
        """
        left = free_bytes
        soon = min(len(self.chain), BIRTHS_AHEAD + 1)
        for wanted in self._missing(self.position, 0, soon, born=True):
            left -= wanted.nbytes
            yield wanted, left >= 0
            if left < 0:
                return
        start, place = self._cursor
        passing = True
        for wanted in self._missing(start, place, len(self.chain), born=False):
            if passing:
                self._cursor = wanted.due
                passing = False
            left -= wanted.nbytes
            yield wanted, left >= 0
            if left < 0:
                return
        if passing:
            self._cursor = max(self._cursor, (self.position + len(self.chain), 0))

    def _missing(self, start: int, place: int, until: int, born: bool) -> Iterator[Wanted]:
        """Blocks of the chain from a place on that are not held, where they are first needed."""
        held, void, due = self.held, self.void, self._due
        for at in range(start - self.position, until):
            execution, items = self.chain[at]
            position = self.position + at
            for k in range(place, len(items)):
                block, nbytes, fresh = items[k]
                if fresh is not born or block in held or (block in void and not born):
                    continue
                if due[block][0] == (position, k):
                    yield Wanted(block, nbytes, execution, (position, k), born)
            place = 0

    # ---- what to let go --------------------------------------------------------------------

    def _rank(self, block: BlockId) -> None:
        """Put a held block where it belongs in the order of leaving."""
        held = self.held.get(block)
        if held is None:
            return
        if sum(map(len, self._ranks)) > 4 * len(self.held) + 64:
            self._ranks = ([], [], [])
            for other in self.held:
                self._push(other, self.held[other])
        else:
            self._push(block, held)

    def _push(self, block: BlockId, held: Held) -> None:
        self._pushes += 1
        held.push = self._pushes
        due = self.due(block)
        if due is None:
            which = REGULAR if held.regular else IRREGULAR
            entry = (held.stamp, 0, self._pushes, block)
        elif self.as_printed:
            which, entry = EXPECTED, (held.stamp, 0, self._pushes, block)
        else:
            which, entry = EXPECTED, (-due[0], -due[1], self._pushes, block)
        heapq.heappush(self._ranks[which], entry)

    def _head(self, which: int) -> _Rank | None:
        """The first entry of one order that still counts."""
        heap = self._ranks[which]
        while heap:
            held = self.held.get(heap[0][3])
            if held is not None and held.push == heap[0][2]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _estimate(self, which: int, entry: _Rank) -> int:
        """In how many executions the block will be needed: as it is expected, or, for what is not,
        in as many as have gone since its last use. What would be expected if it came within the
        chain comes after it.
        """
        if self.as_printed:
            return 0 if which == EXPECTED else FAR
        if which == EXPECTED:
            return -entry[0] - self.position
        age = self.position - self.held[entry[3]].used_at
        return age if which == IRREGULAR else max(age, len(self.chain))

    def victims(self, needed_bytes: int, before: Due | None = None) -> list[Victim]:
        """Blocks whose leaving frees `needed_bytes`, the one needed last first. Blocks in use, or
        on their way in or out, stay.

        For a need that is due at `before`, none that is needed sooner is named, and nothing at all
        where the rest does not suffice; without, all there is.
        """
        chosen: dict[BlockId, Victim] = {}
        freed = 0
        stay: list[tuple[int, _Rank]] = []
        while freed < needed_bytes:
            heads = [(self._estimate(w, h), -w, h) for w in RANKS if (h := self._head(w))]
            if not heads:
                break
            estimate, negative, entry = max(heads)
            which, block = -negative, entry[3]
            if before is not None and (
                (-entry[0], -entry[1]) <= before
                if which == EXPECTED
                else estimate <= before[0] - self.position
            ):
                break
            stay.append((which, heapq.heappop(self._ranks[which])))
            held = self.held[block]
            if block not in self.busy and not held.leaving and not held.arriving:
                chosen[block] = Victim(block, held.nbytes, held.dirty)
                freed += held.nbytes
        for which, entry in stay:
            heapq.heappush(self._ranks[which], entry)
        if before is not None and freed < needed_bytes:
            return []
        return list(chosen.values())
