"""The execution table: which execution comes next (DeepUM, §4.2 and figure 6).

The paper keeps, for the current execution, records of the three before it. Here a record that
has not been seen falls back to a shorter history, and each kind of record (by its length and by
its counter) is believed as far as it has been right lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tables import CERTAIN, Sets, Shape, Successors

#: the current execution and three before it
HISTORY = 4
#: how fast old experience fades, what a new kind of record is worth, and when it is believed
FADING, AT_FIRST, ENOUGH = 1 / 16, 0.75, 0.5

History = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """One record's word for what comes next."""

    execution: int
    length: int
    count: int


class Scores:
    """How often each kind of record was right lately, weighed by the bytes that it would move."""

    def __init__(self) -> None:
        self._scores = [[AT_FIRST] * (CERTAIN + 1) for _ in range(HISTORY + 1)]

    def of(self, guess: Guess) -> float:
        return self._scores[guess.length][guess.count]

    def note(self, guess: Guess, right: float) -> None:
        """`right`: the share of the bytes expected that were then used."""
        row = self._scores[guess.length]
        row[guess.count] += FADING * (right - row[guess.count])


class ExecutionTable:
    """Records of bounded number: the last executions → what followed."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.scores = Scores()
        self._sets: Sets[History, Successors[int]] = Sets(shape)

    @property
    def table_bytes(self) -> int:
        return self._sets.table_bytes

    def learn(self, history: History, following: int) -> None:
        for length in range(1, len(history) + 1):
            key = history[-length:]
            number = hash(key)
            record = self._sets.get(number, key)
            if record is None:
                record = Successors()
                self._sets.put(number, key, record)
            record.saw(following, self.shape.successors)

    def guesses(self, history: History) -> Sequence[Guess]:
        """What each length of history says, the longest first."""
        found = []
        for length in range(len(history), 0, -1):
            key = history[-length:]
            record = self._sets.get(hash(key), key)
            best = None if record is None else record.best()
            if best is not None:
                found.append(Guess(best.name, length, best.count))
        return found

    def next(self, history: History) -> Guess | None:
        """The guess worth most, if it is worth believing; of equals the one of most history."""
        best = max(self.guesses(history), key=self.scores.of, default=None)
        return best if best is not None and self.scores.of(best) >= ENOUGH else None
