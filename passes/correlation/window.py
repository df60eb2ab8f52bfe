"""Tracks the blocks on the device and their next expected uses; orders prefetches and evictions.

The window is the chain of executions expected from here on, with their blocks. A walk along it
gives the blocks to prefetch. Blocks that are not expected are evicted first, least recently used
first, then the block expected last. No table can expect a block selected by data. It is assumed to
be used again after as long as it has been unused, and is not evicted for a block needed later than
that. Prefetching stops when only a block that is needed sooner could make room. So the lookahead is
bounded by bytes as well as by executions (DeepUM bounds it by executions alone).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from .blocks import BlockId, Item

#: when a block is expected: (position of the execution, index within it)
Due = tuple[int, int]


#: eviction orders: expected blocks, regular blocks not expected now, and irregular blocks
EXPECTED, REGULAR, IRREGULAR = RANKS = (0, 1, 2)
FAR = 1 << 60
#: number of executions ahead for which room is made for births: they need no copy, and many blocks
#: die before then
BIRTHS_AHEAD = 2
#: rank in an eviction order (two figures and a tie-break), and the block
_Rank = tuple[int, int, int, BlockId]


class Wanted(NamedTuple):
    """A block that a later execution needs. `born`: needs memory there, but no copy."""

    block: BlockId
    nbytes: int
    execution: Hashable
    due: Due
    born: bool


class Victim(NamedTuple):
    """A block to evict. With `write_back` its bytes must be copied out first."""

    block: BlockId
    nbytes: int
    write_back: bool


class Held:
    """A block on the device, or being loaded."""

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
        #: True if its last use was expected
        self.regular = prefetched
        #: id of its valid entry in the eviction orders
        self.push = 0
        self.arriving = arriving
        self.prefetched = prefetched
        self.dirty = False
        self.leaving = False


class Window:
    """Residency and expected uses. Each call costs about the logarithm of the number held."""

    def __init__(self, as_printed: bool = False) -> None:
        #: the paper's way: age counts from the last load, and also ranks expected blocks
        self.as_printed = as_printed
        self.held: dict[BlockId, Held] = {}
        #: blocks without a value until they are written
        self.void: dict[BlockId, None] = {}
        #: blocks in use now: never evicted
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
        """Appends an execution to the chain."""
        position = self.position + len(self.chain)
        self.chain.append((execution, items))
        for place, item in enumerate(items):
            dues = self._due.setdefault(item.block, deque())
            dues.append((position, place))
            if len(dues) == 1:
                self._rank(item.block)

    def advance(self) -> None:
        """Removes the first execution of the chain, which is over."""
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
        """Clears all expectations."""
        expected, self._due = self._due, {}
        self.chain.clear()
        self._cursor = (self.position, 0)
        for block in expected:
            self._rank(block)

    def due(self, block: BlockId) -> Due | None:
        """Returns when the block is expected next."""
        dues = self._due.get(block)
        return dues[0] if dues else None

    # ---- residency -----------------------------------------------------------------------

    def hold(self, block: BlockId, nbytes: int, arriving: bool, prefetched: bool) -> None:
        """Records that the block takes its bytes on the device from now on."""
        self.void.pop(block, None)
        self.held[block] = held = Held(nbytes, arriving, prefetched)
        self._mark(block, held)

    def use(self, block: BlockId) -> None:
        """Marks the block in use until `busy` is cleared, and cancels its pending eviction."""
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
        """Records that the block's bytes are free again, and returns its entry."""
        held = self.held.pop(block)
        self.busy.discard(block)
        due = self.due(block)
        if due is not None and due < self._cursor:
            self._cursor = due
        return held

    # ---- prefetching -----------------------------------------------------------------------

    def walk(self, free_bytes: int) -> Iterator[tuple[Wanted, bool]]:
        """Yields blocks needed next and not held, and for each if it fits in the free bytes.

        Blocks to be born soon come first, then those to fetch, in order. Ends after the first that
        does not fit.
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
        """Yields blocks not held, from a place in the chain on, where they are first needed."""
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

    # ---- eviction --------------------------------------------------------------------------

    def _rank(self, block: BlockId) -> None:
        """Inserts a held block into its eviction order."""
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
        """Returns the first valid entry of an eviction order."""
        heap = self._ranks[which]
        while heap:
            held = self.held.get(heap[0][3])
            if held is not None and held.push == heap[0][2]:
                return heap[0]
            heapq.heappop(heap)
        return None

    def _estimate(self, which: int, entry: _Rank) -> int:
        """Returns the number of executions until the block is needed.

        An expected block has a known figure; for others it is the number of executions since the
        last use. A regular block that is not expected is needed after the end of the chain at the
        earliest.
        """
        if self.as_printed:
            return 0 if which == EXPECTED else FAR
        if which == EXPECTED:
            return -entry[0] - self.position
        age = self.position - self.held[entry[3]].used_at
        return age if which == IRREGULAR else max(age, len(self.chain))

    def victims(self, needed_bytes: int, before: Due | None = None) -> list[Victim]:
        """Returns blocks whose eviction frees `needed_bytes`, the one needed last first.

        Blocks that are in use or in flight stay. For a need that is due at `before`, it returns no
        block that is needed sooner, and nothing at all if the others do not suffice; without it,
        all there are.
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
