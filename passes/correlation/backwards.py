"""A forecast that knows in which order backwards run.

Data may choose the order of the forwards of a step: layers that are dropped at random, experts,
trees. Autograd then runs their backwards in the reverse order, and each reads the blocks that its
own forward wrote. So all that follows the first backward is known, even if this order has never
come before. The rest is left to the learning forecast. So is this, if its guesses were better
lately: pipelines, and models with losses of their own, run backwards in other orders.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence

from .blocks import BlockId, Item
from .executions import AT_FIRST, ENOUGH, FADING
from .learned import Learned


class _Waiting:
    """A forward whose backward has not begun. `born`: the blocks that it wrote, and their bytes."""

    __slots__ = ("backward", "born")

    def __init__(self, backward: Hashable, born: dict[BlockId, int]) -> None:
        self.backward, self.born = backward, born


class KnownBackwards:
    """Predicts backwards from the forwards that wait for them, and all else like `Learned`.

    backward_of: the backward of a forward; None for other executions.
    """

    def __init__(self, backward_of: Callable[[Hashable], Hashable | None]) -> None:
        self.learned = Learned()
        self._backward_of = backward_of
        #: the newest last
        self._waiting: list[_Waiting] = []
        self._writer: dict[BlockId, _Waiting] = {}
        #: the forward that runs, or the one whose backward runs
        self._forward: _Waiting | None = None
        self._begun: _Waiting | None = None
        self._in_backward = False
        #: share of the backwards lately that came in the reverse order, and the number of forwards
        #: that waited when they began the last time
        self._score, self._depth = AT_FIRST, 0
        #: the forwards that wait at the end of the chain, and if it ends with a backward
        self._left: list[_Waiting] = []
        self._ends_in_backward = False
        #: those of the forwards in the chain that have not run yet, in order, and the one of them
        #: that runs now; True if it has written other blocks than those expected
        self._foreseen: deque[_Waiting] = deque()
        self._running: _Waiting | None = None
        self._outdated = False

    @property
    def table_bytes(self) -> int:
        return self.learned.table_bytes

    # ---- learning --------------------------------------------------------------------------

    def begin(self, execution: Hashable, expected: bool) -> bool:
        waiting = self._waiting
        expected = expected and not self._outdated
        begun = _newest(waiting, execution)
        if self._in_backward and waiting:
            self._score += FADING * ((begun is waiting[-1]) - self._score)
        elif begun is not None:
            self._depth = len(waiting)
        self._begun, self._in_backward = begun, begun is not None
        if begun is not None:
            waiting.remove(begun)
        backward = None if begun is not None else self._backward_of(execution)
        self._forward = None if backward is None else _Waiting(backward, {})
        if self._forward is not None:
            waiting.append(self._forward)
        self.learned.begin(execution, expected)
        self._outdated, self._running = False, None
        if not expected:
            self._left, self._ends_in_backward = list(waiting), self._in_backward
            self._foreseen.clear()
        elif self._forward is not None:
            self._running = self._foreseen.popleft()
        return expected

    def touch(self, block: BlockId, nbytes: int, born: bool) -> None:
        if born and self._forward is not None:
            self._forward.born[block] = nbytes
            self._writer[block] = self._forward
        self.learned.touch(block, nbytes, born)

    def end(self) -> None:
        forward, self._forward, self._begun = self._forward, None, None
        running = self._running
        if forward is not None:
            self._outdated = running is not None and running.born != forward.born
            if running in self._left:
                self._left[self._left.index(running)] = forward
            if not forward.born:
                self._forget(forward)
        self.learned.end()

    def dead(self, block: BlockId) -> None:
        writer = self._writer.pop(block, None)
        if writer is not None:
            del writer.born[block]
            if not writer.born and writer is not self._forward:
                self._forget(writer)
        self.learned.dead(block)

    def _forget(self, forward: _Waiting) -> None:
        """Expect no backward of it any more."""
        for waiting in (self._waiting, self._left):
            if forward in waiting:
                waiting.remove(forward)

    # ---- prediction ------------------------------------------------------------------------

    def items(self, execution: Hashable) -> Sequence[Item]:
        if self._begun is not None:
            return self._read_by(self._begun)
        return self.learned.items(execution)

    def ahead(self) -> tuple[Hashable, Sequence[Item]] | None:
        guess, trust = self.learned.guess()
        following = guess
        if self._left and self._score >= max(trust, ENOUGH):
            newest = self._left[-1].backward
            if self._ends_in_backward or len(self._left) >= self._depth:
                following = newest
            elif guess != newest and _newest(self._left, guess) is not None:
                return None  # another forward comes first, and nothing says which
        if following is None:
            return None
        self.learned.follow(following)
        begun = _newest(self._left, following)
        self._ends_in_backward = begun is not None
        if begun is not None:
            self._left.remove(begun)
            return following, self._read_by(begun)
        items = self.learned.items(following)
        backward = self._backward_of(following)
        if backward is not None:
            forward = _Waiting(backward, {i.block: i.nbytes for i in items if i.born})
            self._left.append(forward)
            self._foreseen.append(forward)
        return following, items

    def _read_by(self, begun: _Waiting) -> Sequence[Item]:
        """The blocks that its backward reads: the learned ones first, in their order, but for those
        that other forwards wrote."""
        found = [
            item
            for item in self.learned.items(begun.backward)
            if self._writer.get(item.block, begun) is begun
        ]
        known = {item.block for item in found}
        rest = reversed(begun.born.items())
        return [*found, *(Item(block, n, False) for block, n in rest if block not in known)]


def _newest(waiting: Sequence[_Waiting], backward: Hashable) -> _Waiting | None:
    """The newest forward that waits for this backward."""
    return next((w for w in reversed(waiting) if w.backward == backward), None)
