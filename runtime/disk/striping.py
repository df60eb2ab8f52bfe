"""Chooses the directory of each stripe, in proportion to the speed of its disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from offcompile.ir import OffloadError
from offcompile.runtime.base.once import made_once

#: minimum stripe size: a system call would move too little otherwise
LEAST_STRIPE_BYTES = 1 << 20
#: stripes per directory and extent, enough to approximate the shares
STRIPES_EACH = 4

Measure = Callable[[Path], float]


class Turns:
    """Hands out turns in proportion to `weights`; a directory passed over is not compensated."""

    def __init__(self, weights: Sequence[float]) -> None:
        wrong = [w for w in weights if not 0 < w < float("inf")]
        if wrong or not weights:
            raise OffloadError(f"shares of directories are {list(weights)}: give positive numbers")
        self.weights = tuple(weights)
        #: virtual finish time of each: its bytes so far, divided by its weight
        self._ends = [0.0] * len(weights)

    def order(self, nbytes: int) -> list[int]:
        """Returns all directories, those first that would finish `nbytes` more earliest."""
        ends = [self._end(i, nbytes) for i in range(len(self._ends))]
        return sorted(range(len(ends)), key=lambda i: (ends[i], i))

    def took(self, which: int, nbytes: int) -> None:
        """Record that `which` took `nbytes`; those before it in the order had no room."""
        begin = self._ends[which]
        for passed in self.order(nbytes):
            if passed == which:
                break
            self._ends[passed] = max(self._ends[passed], begin)
        self._ends[which] = self._end(which, nbytes)

    def _end(self, which: int, nbytes: int) -> float:
        return self._ends[which] + nbytes / self.weights[which]


def stripe_of(nbytes: int, directories: int, most_bytes: int) -> int:
    """Returns how many bytes of an extent of `nbytes` (whole pages) form one stripe."""
    if directories == 1:
        return nbytes
    page = 4096
    share = -(-nbytes // (STRIPES_EACH * directories) // page) * page
    return min(most_bytes, max(LEAST_STRIPE_BYTES, share))


def shares(directories: Sequence[Path], measure: Measure) -> list[float]:
    """Returns each directory's share of the stripes, by the speed of its disk.

    The speed is measured once per disk and process, and not at all if all are on one disk.
    Directories of one disk divide its speed. Shares are equal if a disk is too full to measure, or
    a directory was removed after its file was opened (the file still works).
    """
    equal = [1.0] * len(directories)
    try:
        disks = [os.stat(place).st_dev for place in directories]
    except OSError:
        return equal
    if len(set(disks)) == 1:
        return equal
    try:
        return [
            made_once("speed of a disk", disk, partial(measure, place)) / disks.count(disk)
            for place, disk in zip(directories, disks, strict=True)
        ]
    except OffloadError:
        return equal
