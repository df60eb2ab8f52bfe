"""Which directory takes the next stripe: each gets a share that goes by how fast it is."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from offcompile.ir import OffloadError

#: stripes are no smaller: a system call would move too little
LEAST_STRIPE_BYTES = 1 << 20
#: an extent is cut into so many stripes for each directory, so that shares come out
STRIPES_EACH = 4

Measure = Callable[[Path], float]

_lock = threading.Lock()
_measured: dict[int, float] = {}


class Turns:
    """Hands out turns in proportion to `weights`; who was passed over makes nothing up later."""

    def __init__(self, weights: Sequence[float]) -> None:
        wrong = [w for w in weights if not 0 < w < float("inf")]
        if wrong or not weights:
            raise OffloadError(f"shares of directories are {list(weights)}: give positive numbers")
        self.weights = tuple(weights)
        #: what each has had, in its own time
        self._ends = [0.0] * len(weights)

    def order(self, nbytes: int) -> list[int]:
        """All of them, the one first whose share is filled last by `nbytes` more."""
        ends = [self._end(i, nbytes) for i in range(len(self._ends))]
        return sorted(range(len(ends)), key=lambda i: (ends[i], i))

    def took(self, which: int, nbytes: int) -> None:
        """Those before `which` in the order had no room."""
        begin = self._ends[which]
        for passed in self.order(nbytes):
            if passed == which:
                break
            self._ends[passed] = max(self._ends[passed], begin)
        self._ends[which] = self._end(which, nbytes)

    def _end(self, which: int, nbytes: int) -> float:
        return self._ends[which] + nbytes / self.weights[which]


def stripe_of(nbytes: int, directories: int, most_bytes: int) -> int:
    """How much of an extent of `nbytes` (whole pages) goes to one directory at a time."""
    if directories == 1:
        return nbytes
    page = 4096
    share = -(-nbytes // (STRIPES_EACH * directories) // page) * page
    return min(most_bytes, max(LEAST_STRIPE_BYTES, share))


def shares(directories: Sequence[Path], measure: Measure) -> list[float]:
    """What part of the stripes each directory is to get: by the speed of its disk.

    That is measured once per disk and process, and not at all where all are on one disk.
    Directories of one disk share what it takes. Equal ones where a disk is too full to measure, or
    a directory has gone since its file was opened, which serves all the same.
    """
    equal = [1.0] * len(directories)
    try:
        disks = [os.stat(place).st_dev for place in directories]
    except OSError:
        return equal
    if len(set(disks)) == 1:
        return equal
    found = []
    for place, disk in zip(directories, disks, strict=True):
        with _lock:
            if disk not in _measured:
                try:
                    _measured[disk] = measure(place)
                except OffloadError:
                    return equal
            found.append(_measured[disk] / disks.count(disk))
    return found
