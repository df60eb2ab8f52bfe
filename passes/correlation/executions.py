"""The execution table: predicts the next execution (DeepUM, §4.2 and figure 6).

For the current execution, the paper keeps records of the three before it. Here an unseen record
falls back to a shorter history, and each kind of record (by its length and counter) is trusted as
far as it was accurate lately.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .tables import CERTAIN, Sets, Shape, Successors

#: the current execution and the three before it
HISTORY = 4
#: decay of old scores, initial score of a new kind of record, and the score from which it is
#: trusted
FADING, AT_FIRST, ENOUGH = 1 / 16, 0.75, 0.5

History = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Guess:
    """A record's prediction of the next execution."""

    execution: int
    length: int
    count: int


class Scores:
    """The recent accuracy of each kind of record, weighted by the bytes that it would move."""

    def __init__(self) -> None:
        self._scores = [[AT_FIRST] * (CERTAIN + 1) for _ in range(HISTORY + 1)]

    def of(self, guess: Guess) -> float:
        return self._scores[guess.length][guess.count]

    def note(self, guess: Guess, right: float) -> None:
        """`right`: the fraction of the predicted bytes that were then used."""
        row = self._scores[guess.length]
        row[guess.count] += FADING * (right - row[guess.count])


class ExecutionTable:
    """A bounded table of records: the last executions → the next one."""

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
        """Returns the guess of each history length, the longest first."""
        found = []
        for length in range(len(history), 0, -1):
            key = history[-length:]
            record = self._sets.get(hash(key), key)
            best = None if record is None else record.best()
            if best is not None:
                found.append(Guess(best.name, length, best.count))
        return found

    def next(self, history: History) -> Guess | None:
        """Returns the best guess if it is trusted; ties go to the longest history."""
        best = max(self.guesses(history), key=self.scores.of, default=None)
        return best if best is not None and self.scores.of(best) >= ENOUGH else None
