"""Bytes per run, with fast addition to ranges and fast search for the last run above a limit.

Runs are grouped in blocks: an addition to a whole block is recorded once per block, as is its
maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor

BITS = 5
SIZE = 1 << BITS


class MemoryProfile:
    """A list of integers with fast additions to ranges."""

    def __init__(self, values: Sequence[int]) -> None:
        self._values = list(values)
        #: per block: the amount to add to its values, and its maximum including that amount
        self._more = [0] * (len(values) + SIZE - 1 >> BITS)
        self._most = [max(values[at : at + SIZE]) for at in range(0, len(values), SIZE)]

    def copy(self) -> MemoryProfile:
        other = MemoryProfile.__new__(MemoryProfile)
        other._values, other._more = list(self._values), list(self._more)
        other._most = list(self._most)
        return other

    def __getitem__(self, at: int) -> int:
        return self._values[at] + self._more[at >> BITS]

    def values(self) -> list[int]:
        more = self._more
        return [x + more[at >> BITS] for at, x in enumerate(self._values)]

    def add(self, first: int, end: int, amount: int) -> None:
        """Adds to the non-empty range from `first` to `end` (exclusive)."""
        low, high = first >> BITS, end - 1 >> BITS
        if low == high:
            self._add_within(low, first, end, amount)
            return
        if first & (SIZE - 1):
            self._add_within(low, first, low + 1 << BITS, amount)
            low += 1
        if end & (SIZE - 1):
            self._add_within(high, high << BITS, end, amount)
            high -= 1
        more, most = self._more, self._most
        for block in range(low, high + 1):
            more[block] += amount
            most[block] += amount

    def _add_within(self, block: int, first: int, end: int, amount: int) -> None:
        values = self._values
        values[first:end] = changed = [x + amount for x in values[first:end]]
        most = max(changed) + self._more[block]
        if amount < 0:
            start = block << BITS
            self._most[block] = max(values[start : start + SIZE]) + self._more[block]
        elif most > self._most[block]:
            self._most[block] = most

    def last_over(self, first: int, end: int, limit: float) -> int | None:
        """Returns the last index from `first` to `end` (exclusive) with a value above a limit."""
        values, most = self._values, self._most
        while first < end:
            block = end - 1 >> BITS
            start = max(first, block << BITS)
            if most[block] > limit:
                rest = floor(limit) - self._more[block]  # exact
                for at in range(end - 1, start - 1, -1):
                    if values[at] > rest:
                        return at
            end = start
        return None
