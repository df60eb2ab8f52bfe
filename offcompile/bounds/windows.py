"""Windows of time: how finely each gap is looked at, and which lane time each window may use.

Far from the access that a copy leaves after, or must be back for, a coarse look loses little. So
the marks of a gap stand close together at one end and spread out towards the other, and what a
lane carries between two marks is booked on a few nodes of a binary tree over the slots. Whatever
is booked inside a node fits into its time: every schedule passes, so bounds stay bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .matrix import Ints

#: marks that stand side by side before they spread, and how fast they do then
CLOSE_MARKS = 14
SPREAD = 4
MAX_STEP = 4


@dataclass(frozen=True)
class Tree:
    """Nodes over slots: the root is 1, node v has the children 2v and 2v + 1."""

    n_slots: int

    @property
    def size(self) -> int:
        return 1 << max(0, self.n_slots - 1).bit_length()

    def slots(self, node: int) -> range:
        """The slots under a node."""
        first, last = node, node
        while first < self.size:
            first, last = 2 * first, 2 * last + 1
        return range(first - self.size, min(last - self.size + 1, self.n_slots))

    def cover(self, first: int, last: int) -> list[int]:
        """The fewest nodes whose slots are first..last, in order of time."""
        a, b = self.size + first, self.size + last + 1
        left: list[int] = []
        right: list[int] = []
        while a < b:
            if a & 1:
                left.append(a)
                a += 1
            if b & 1:
                b -= 1
                right.append(b)
            a, b = a // 2, b // 2
        return left + right[::-1]


@dataclass(frozen=True)
class Marks:
    """Where a gap is looked at, and the windows between.

    `at`: places among the samples inside the gap. Window g ends at mark g; the last one at the
    gap's end. `slot_window`: the window of each slot. `nodes`, `windows`: what may be booked.
    """

    at: Ints
    slot_window: Ints
    nodes: tuple[int, ...]
    windows: Ints

    @property
    def count(self) -> int:
        """Levels: one per mark, and one at the end of the gap."""
        return len(self.at) + 1


def marks(
    tree: Tree, slots: Ints, wanted: npt.NDArray[np.bool_], close_at_end: bool | None
) -> Marks:
    """Marks at some of the `wanted` samples, close together at one end (None: everywhere)."""
    places = np.flatnonzero(wanted)
    if close_at_end is not None and len(places) > CLOSE_MARKS:
        order = places[::-1] if close_at_end else places
        places = np.sort(_spread(order, slots[len(slots) - len(wanted) :]))
    ahead = len(slots) - len(wanted)  # slots before the first sample
    starts = np.zeros(len(slots), dtype=np.int64)
    starts[places + ahead] = 1
    window = np.cumsum(starts)
    nodes: list[int] = []
    windows: list[int] = []
    edges = np.flatnonzero((np.diff(slots) != 1) | (starts[1:] == 1)) + 1
    for run in np.split(np.arange(len(slots)), edges):
        found = tree.cover(int(slots[run[0]]), int(slots[run[-1]]))
        nodes += found
        windows += [int(window[run[0]])] * len(found)
    return Marks(places, window, tuple(nodes), np.array(windows, dtype=np.int64))


def _spread(order: Ints, slots_after: Ints) -> Ints:
    """The first few of `order`, then ever fewer, on slots where tree nodes begin."""
    picked = list(order[:CLOSE_MARKS])
    k = CLOSE_MARKS
    while k < len(order):
        step = min(MAX_STEP, 1 << int(np.log2(max(1, k // SPREAD))))
        ahead = order[k : k + step]
        # a slot that is a multiple of the step begins a node of that width
        aligned = [p for p in ahead if slots_after[p] % step == 0]
        picked.append(aligned[-1] if aligned else ahead[-1])
        k += step
    return np.array(picked, dtype=np.int64)
