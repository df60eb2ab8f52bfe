"""Bounded tables of successors, learned from earlier executions (DeepUM, §4.2).

Sets are chosen by small numbers that `Numbers` assigns in order of first use, never by the hash of
a name, so the same run always fills the same tables.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

#: two-bit counters: a successor is believed from 2 up
BELIEVED, CERTAIN = 2, 3
#: upper bounds on CPython's memory use, with each entry's share of the dictionaries around it
ROW_BYTES, SUCCESSOR_BYTES, SET_BYTES, NAME_BYTES = 560, 112, 360, 200


@dataclass(frozen=True, slots=True)
class Shape:
    """Total rows, rows per set, and successors kept per row."""

    rows: int
    associativity: int
    successors: int

    def __post_init__(self) -> None:
        for name in ("rows", "associativity", "successors"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.rows < self.associativity:
            raise ValueError(
                f"{self.rows} rows cannot be {self.associativity}-way associative; use as many"
                " rows as ways, or more"
            )

    @property
    def sets(self) -> int:
        return self.rows // self.associativity


def most_bytes(shape: Shape) -> int:
    """Returns the size of a full table of this shape."""
    each = ROW_BYTES + SUCCESSOR_BYTES * shape.successors
    return shape.rows * each + shape.sets * SET_BYTES


class Numbers(Generic[K]):
    """Numbers names in order of first use; forgets the names longest unseen."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._known: OrderedDict[K, int] = OrderedDict()
        self._next = 0

    def __len__(self) -> int:
        return len(self._known)

    def of(self, name: K) -> int:
        number = self._known.get(name)
        if number is not None:
            self._known.move_to_end(name)
            return number
        number = self._known[name] = self._next
        self._next += 1
        if len(self._known) > self.limit:
            self._known.popitem(last=False)
        return number


class Sets(Generic[K, V]):
    """A set-associative table; a full set evicts its least recently used row."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self._sets: dict[int, OrderedDict[K, V]] = {}
        self._count = shape.sets
        self.rows = 0

    def get(self, number: int, key: K) -> V | None:
        rows = self._sets.get(number % self._count)
        if rows is None or key not in rows:
            return None
        rows.move_to_end(key)
        return rows[key]

    def put(self, number: int, key: K, value: V) -> None:
        """Adds a row that is not there yet."""
        rows = self._sets.setdefault(number % self._count, OrderedDict())
        if len(rows) >= self.shape.associativity:
            rows.popitem(last=False)
            self.rows -= 1
        rows[key] = value
        self.rows += 1

    @property
    def table_bytes(self) -> int:
        each = ROW_BYTES + SUCCESSOR_BYTES * self.shape.successors
        return self.rows * each + len(self._sets) * SET_BYTES


class Successor(Generic[K]):
    __slots__ = ("count", "name")

    def __init__(self, name: K, count: int) -> None:
        self.name = name
        self.count = count


class Successors(Generic[K]):
    """Observed successors, most recent first, each with a two-bit counter."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries: list[Successor[K]] = []

    def saw(self, name: K, limit: int) -> bool:
        """Records that `name` followed. Returns True if that changed anything."""
        entries = self.entries
        if entries and entries[0].name == name and entries[0].count == CERTAIN:
            changed = False
            for other in entries[1:]:
                if other.count:
                    other.count -= 1
                    changed = True
            return changed
        found = None
        for entry in entries:
            if entry.name == name:
                found = entry
            elif entry.count:
                entry.count -= 1
        if found is None:
            # the first is believed at once; later ones must be seen again
            found = Successor(name, 1 if entries else BELIEVED)
        else:
            entries.remove(found)
            found.count = min(CERTAIN, found.count + 1)
        entries.insert(0, found)
        if len(entries) > limit:
            entries.remove(min(reversed(entries), key=lambda e: e.count))
        return True

    def best(self) -> Successor[K] | None:
        """Returns the most likely successor; ties go to the most recent."""
        return max(self.entries, key=lambda e: e.count, default=None)
