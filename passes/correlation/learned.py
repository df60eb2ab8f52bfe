"""The learning forecast: execution ids, the execution table, and a block table per execution."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .blocks import BlockId, BlockTable, Item
from .executions import HISTORY, ExecutionTable, Guess
from .tables import NAME_BYTES, Numbers, Shape, most_bytes


class Forecast(Protocol):
    """A source of predictions of the next executions. It tracks the end of its own chain."""

    def begin(self, execution: Hashable, expected: bool) -> bool:
        """Starts an execution. If it was not the one expected, the chain restarts from it.

        Returns False if the chain restarts anyway, since other blocks are now known.
        """
        ...

    def touch(self, block: BlockId, nbytes: int, born: bool) -> None:
        """Records the first use of a block by the execution."""
        ...

    def end(self) -> None:
        """Ends the execution."""
        ...

    def dead(self, block: BlockId) -> None:
        """Records that a block has no value until it is written again."""
        ...

    def items(self, execution: Hashable) -> Sequence[Item]:
        """Returns the blocks that an execution is expected to touch."""
        ...

    def ahead(self) -> tuple[Hashable, Sequence[Item]] | None:
        """Extends the chain by the execution expected next and returns it; None if unknown."""
        ...


EXECUTIONS = Shape(rows=4096, associativity=4, successors=4)
BLOCKS = Shape(rows=512, associativity=2, successors=4)


@dataclass(frozen=True, slots=True)
class LearnedLimits:
    """Size limits of the tables."""

    executions: Shape = EXECUTIONS
    blocks: Shape = BLOCKS
    #: numbers of executions and block names remembered
    known_executions: int = 1024
    known_blocks: int = 65536
    #: limit for all block tables together; the executions longest unseen are forgotten first
    block_table_bytes: int = 16 << 20

    @property
    def most_bytes(self) -> int:
        """An upper bound on the size of the tables, by the figures of `Learned.table_bytes`."""
        names = self.known_executions + self.known_blocks
        largest = most_bytes(self.blocks)  # one block table is kept whatever its size
        blocks = max(self.block_table_bytes, largest)
        return most_bytes(self.executions) + blocks + NAME_BYTES * names


class _LearnedBlock:
    """A known execution."""

    __slots__ = ("execution", "number", "table", "table_bytes")

    def __init__(self, execution: Hashable, number: int, table: BlockTable) -> None:
        self.execution = execution
        self.number = number
        self.table = table
        self.table_bytes = 0


class Learned:
    """Predicts that the successor seen last time comes again (DeepUM, §4.2)."""

    def __init__(self, limits: LearnedLimits | None = None) -> None:
        self.limits = limits or LearnedLimits()
        self.executions = ExecutionTable(self.limits.executions)
        self._blocks: Numbers[BlockId] = Numbers(self.limits.known_blocks)
        self._known: OrderedDict[Hashable, _LearnedBlock] = OrderedDict()
        self._by_number: dict[int, _LearnedBlock] = {}
        self._numbers = 0
        self._block_bytes = 0
        self._history: deque[int] = deque(maxlen=HISTORY)
        self._end: deque[int] = deque(maxlen=HISTORY)
        self._now: _LearnedBlock | None = None
        self._touched: set[BlockId] = set()
        self._to_judge: list[Guess] = []

    @property
    def table_bytes(self) -> int:
        """The size of the tables, by an upper bound for each entry."""
        names = len(self._blocks) + len(self._known)
        return self.executions.table_bytes + self._block_bytes + NAME_BYTES * names

    # ---- learning --------------------------------------------------------------------------

    def begin(self, execution: Hashable, expected: bool) -> bool:
        now = self._now = self._number(execution)
        history = tuple(self._history)
        self._to_judge = []
        if history:
            for guess in self.executions.guesses(history):
                if guess.execution == now.number:
                    self.executions.scores.note(guess, 1.0)
                else:
                    self._to_judge.append(guess)  # its blocks may still be the right ones
            self.executions.learn(history, now.number)
        self._history.append(now.number)
        if not expected:
            self._end = self._history.copy()
        self._touched = set()
        now.table.begin()
        return expected

    def touch(self, block: BlockId, nbytes: int, born: bool) -> None:
        if self._now is not None and block not in self._touched:
            self._touched.add(block)
            self._now.table.touch(block, nbytes, born)

    def end(self) -> None:
        now = self._now
        if now is None:
            return
        for guess in self._to_judge:
            self.executions.scores.note(guess, self._share_used(guess.execution))
        now.table.end_visit(self._touched)
        self._block_bytes += now.table.table_bytes - now.table_bytes
        now.table_bytes = now.table.table_bytes
        self._now = None
        while self._block_bytes > self.limits.block_table_bytes and len(self._known) > 1:
            self._forget_oldest()

    def dead(self, block: BlockId) -> None:
        """Nothing: what is learned of a block outlives its value."""

    def _share_used(self, number: int) -> float:
        """Returns the fraction of another execution's prefetched bytes that are used now."""
        other = self._by_number.get(number)
        fetched = [] if other is None else [i for i in other.table.items() if not i.born]
        total = sum(i.nbytes for i in fetched)
        return sum(i.nbytes for i in fetched if i.block in self._touched) / total if total else 0.0

    def _number(self, execution: Hashable) -> _LearnedBlock:
        known = self._known.get(execution)
        if known is not None:
            self._known.move_to_end(execution)
            return known
        table = BlockTable(self.limits.blocks, self._blocks)
        known = self._known[execution] = _LearnedBlock(execution, self._numbers, table)
        self._by_number[known.number] = known
        self._numbers += 1
        if len(self._known) > self.limits.known_executions:
            self._forget_oldest()
        return known

    def _forget_oldest(self) -> None:
        _, known = self._known.popitem(last=False)
        del self._by_number[known.number]
        self._block_bytes -= known.table_bytes

    # ---- prediction ------------------------------------------------------------------------

    def items(self, execution: Hashable) -> Sequence[Item]:
        known = self._known.get(execution)
        return () if known is None else known.table.items()

    def ahead(self) -> tuple[Hashable, Sequence[Item]] | None:
        following, _ = self.guess()
        if following is None:
            return None
        self.follow(following)
        return following, self.items(following)

    def guess(self) -> tuple[Hashable | None, float]:
        """Returns the execution that probably follows the chain, and how far that is trusted."""
        guess = self.executions.next(tuple(self._end))
        known = None if guess is None else self._by_number.get(guess.execution)
        if guess is None or known is None:
            return None, 0.0
        return known.execution, self.executions.scores.of(guess)

    def follow(self, execution: Hashable) -> None:
        """Extends the chain by an execution."""
        known = self._known.get(execution)
        if known is not None:
            self._end.append(known.number)
