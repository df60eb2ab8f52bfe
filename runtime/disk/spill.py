"""The disk tier: extents in unlinked files, striped over directories, written as a log."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np

from offcompile.ir import OffloadError
from offcompile.runtime.base import posix, watchdog
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.base.threads import TaskQueue, Work, side_by_side

from .directories import ELSEWHERE
from .speed import speed_of
from .spill_file import Files, SpillFile, calls_for, part_of
from .spill_space import Extent, ExtentTable, SpillSpace, StripePiece

#: how long each disk's speed is measured if there are several directories
STRIPE_SPEED_S = 0.1
#: approximate limit per system call, so that a fork does not wait long
_CHUNK_BYTES = 8 << 20


#: (file, offset in the file, offset in the moved data, bytes)
Transfer = Callable[[int, int, int, int], None]


class SpillFull(OffloadError):
    """Raised if there is no room for an extent; says where, how much is missing, and the remedy."""


class SpillStore:
    """Files that hold offloaded data and disappear with the store. Thread-safe.

    capacity_bytes: limit on the total size of the files (None: whatever the disks can hold).
    stripe_bytes: most bytes that go to one directory before the next takes its turn.
    weights: the proportions in which the directories get stripes; None: by the speed of their
    disks, measured at the first allocation. Directories work in parallel, so a move takes as long
    as its slowest part.
    reserve_bytes: space left free on every file system.
    direct: True if all files bypass the page cache. verified: True if data is checked in transit,
    so that it must pass through host memory. elsewhere: advice in errors on naming another
    directory.
    A forked child cannot use the store: every call but `release` and `close` raises there.
    """

    verified = False

    def __init__(
        self,
        directories: Sequence[str | os.PathLike[str]],
        capacity_bytes: int | None = None,
        stripe_bytes: int = 8 << 20,
        reserve_bytes: int = 512 << 20,
        files: Files | None = None,
        elsewhere: str = ELSEWHERE,
        weights: Sequence[float] | None = None,
    ) -> None:
        if not directories:
            raise OffloadError("a spill store needs a directory: none was named")
        if stripe_bytes <= 0 or stripe_bytes % PAGE_BYTES:
            raise OffloadError(f"stripe_bytes={stripe_bytes}: give a positive multiple of 4096")
        calls = files or Files()
        self.directories = tuple(Path(directory) for directory in directories)
        self._files = [
            SpillFile(place, calls, reserve_bytes, elsewhere) for place in self.directories
        ]
        self.direct = all(file.direct for file in self._files)
        self._reserve_bytes = reserve_bytes
        self._elsewhere = elsewhere
        if weights is not None and len(weights) != len(directories):
            raise OffloadError(
                f"{len(weights)} weights for {len(directories)} directories: give one for each"
            )
        self._space = SpillSpace(self._files, capacity_bytes, stripe_bytes, weights, _stripe_speed)
        self._extents = ExtentTable()
        #: one queue per file and direction, so that reads do not wait for writes
        self._queues = {
            (at, writing): TaskQueue(f"offcompile-spill-{at}{'w' if writing else 'r'}")
            for at in range(len(self._files))
            for writing in (False, True)
        }
        for queue in self._queues.values():
            weakref.finalize(self, queue.close).atexit = False
        self._bytes_written = self._bytes_read = 0
        self._running = 0
        self._settled = threading.Condition(threading.Lock())
        self._owner = os.getpid()
        self._is_open = True
        posix.watch(self)

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated extents, in whole pages."""
        with self._settled:
            self._extents.take_back(self._space)
            return self._extents.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._extents.peak_bytes

    @property
    def file_bytes(self) -> int:
        """Disk space taken by the files: the peak, rounded up to steps of growth."""
        return self._space.file_bytes

    @property
    def bytes_written(self) -> int:
        return self._bytes_written

    @property
    def bytes_read(self) -> int:
        return self._bytes_read

    def allocate(self, nbytes: int) -> Extent:
        """Allocate `nbytes`; raises SpillFull. The contents are undefined until written."""
        if nbytes <= 0:
            raise OffloadError(f"an extent of {nbytes} bytes is not possible: give 1 or more")
        padded = page_multiple(nbytes, PAGE_BYTES)
        with self._settled:
            self._check()
            self._extents.take_back(self._space)
            if padded > self._space.available_bytes(padded):
                raise self._full(nbytes)
            pieces: list[StripePiece] = []
            try:
                self._space.take(padded, pieces)
                if sum(piece.nbytes for piece in pieces) < padded:
                    raise self._full(nbytes)
            except OffloadError:
                self._space.give_back(pieces)
                raise
            return self._extents.add(nbytes, pieces)

    def release(self, extent: Extent) -> None:
        """Free the extent, once, while no move of it runs. Never waits: finalizers may call it."""
        self._extents.release(extent)

    def write(self, extent: Extent, offset: int, buffer: memoryview) -> None:
        """Write `buffer` at `offset` of `extent`, all whole pages; returns when it is on disk."""
        self._move(extent, offset, [buffer], writing=True)

    def write_parts(self, extent: Extent, offset: int, buffers: Sequence[memoryview]) -> None:
        """Write `buffers` one after the other at `offset`, in one call instead of one per buffer.

        Each must be whole pages.
        """
        self._move(extent, offset, buffers, writing=True)

    def read(self, extent: Extent, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` of `extent`, all in whole pages."""
        self._move(extent, offset, [buffer], writing=False)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the open files, in the order of `directories`."""
        return tuple(file.descriptor for file in self._files)

    def ranges(self, extent: Extent, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Returns the location of that part of `extent`: (file, offset in it, bytes), in order."""
        self._check_range(extent, offset, nbytes)
        return [
            (piece.file, piece.offset + within, size)
            for piece, within, _, size in _pieces_of(extent, offset, nbytes)
        ]

    def spread(
        self, extent: Extent, offset: int, nbytes: int, writing: bool, transfer: Transfer
    ) -> None:
        """Call `transfer` for each piece of the range, directories in parallel on their threads.

        Returns when no transfer runs any more; raises the first error.
        """
        self._check_range(extent, offset, nbytes)
        by_file: dict[int, list[Work]] = {}
        for piece, within, at, size in _pieces_of(extent, offset, nbytes):
            work = partial(transfer, piece.file, piece.offset + within, at, size)
            by_file.setdefault(piece.file, []).append(work)
        side_by_side([(self._queues[at, writing], works) for at, works in by_file.items()])

    @contextmanager
    def moving(self, nbytes: int, writing: bool) -> Iterator[None]:
        """Blocks forks and `close` while `nbytes` move; counts them once they have moved."""
        self._begin()
        moved = 0
        try:
            yield
            moved = nbytes
        finally:
            self._end(moved, writing)

    def flush(self) -> None:
        """Sync all files and drop them from the page cache (for files that are not direct)."""
        with self._settled:
            self._check()
            for file in self._files:
                file.flush()

    def close(self) -> None:
        """Wait for running moves, then close the files and free their space.

        If a disk hangs, warns and leaves the files open until the process ends.
        """
        with self._settled:
            self._is_open = False
            try:
                watchdog.until(self._settled, lambda: not self._running, self._described)
            except watchdog.Stalled as stalled:
                warnings.warn(f"{stalled}. Its files stay open.", watchdog.StallWarning, 2)
            else:
                for file in self._files:
                    file.close()
        for queue in self._queues.values():
            queue.close()

    def __enter__(self) -> SpillStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _full(self, nbytes: int) -> SpillFull:
        places = ", ".join(
            f"{file.directory} ({file.room_bytes()} bytes can still be taken there, "
            f"{self._reserve_bytes} are left alone)"
            for file in self._files
        )
        capacity = self._space.capacity_bytes
        bound = "no bound" if capacity is None else f"{capacity} bytes"
        return SpillFull(
            f"no room for {nbytes} bytes in {places}: {self._extents.used_bytes} bytes are in use "
            f"and {self._space.free_bytes} free in its files, capacity: {bound}. Free space there, "
            f"raise the capacity, or {self._elsewhere}"
        )

    def _check_range(self, extent: Extent, offset: int, nbytes: int) -> None:
        if not self._extents.holds(extent):
            raise OffloadError(f"extent {extent.number} is not allocated here, or was released")
        if offset < 0 or offset % PAGE_BYTES or nbytes % PAGE_BYTES or not nbytes:
            raise OffloadError(
                f"{nbytes} bytes at {offset} cannot be moved directly: both have to be "
                f"multiples of {PAGE_BYTES}"
            )
        if offset + nbytes > extent.padded_nbytes:
            raise OffloadError(
                f"{nbytes} bytes at {offset} do not lie in an extent of {extent.padded_nbytes}"
            )

    def _move(
        self, extent: Extent, offset: int, buffers: Sequence[memoryview], writing: bool
    ) -> None:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        nbytes = sum(map(len, views))
        self._check_range(extent, offset, nbytes)
        for view in views:
            _check_pages(view)

        def transfer(at: int, start: int, begin: int, size: int) -> None:
            file, part = self._files[at], part_of(views, begin, size)
            call = file.write if writing else file.read
            for done, now in calls_for(size, _CHUNK_BYTES):
                with self.moving(now, writing):
                    call(start + done, part_of(part, done, now))

        self.spread(extent, offset, nbytes, writing, transfer)

    def _begin(self) -> None:
        with self._settled:
            self._check()
            self._running += 1

    def _end(self, moved: int, writing: bool) -> None:
        with self._settled:
            self._running -= 1
            if writing:
                self._bytes_written += moved
            else:
                self._bytes_read += moved
            if not self._running:
                self._settled.notify_all()

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise OffloadError(
                f"the spill store of process {self._owner} was used in {os.getpid()}, forked from "
                "it: make a store, or compile the model, in the process that runs it"
            )
        if not self._is_open:
            raise OffloadError("the spill store is closed: make another one")

    def before_fork(self) -> None:
        # a page that turns copy-on-write while the disk fills it would be lost to one process
        self._settled.acquire()
        while self._running:
            # a fork cannot be refused: wait as long as the disk takes, with a warning
            with suppress(watchdog.Stalled):
                watchdog.until(self._settled, lambda: not self._running, self._described)

    def _described(self) -> str:
        places = ", ".join(map(str, self.directories))
        return f"The end of {self._running} moves to and from the spill files in {places}"

    def after_fork(self, in_child: bool) -> None:
        if in_child:
            # otherwise the child would keep the disk space of files that its parent has closed
            for file in self._files:
                file.close()
        self._settled.release()


def _check_pages(view: memoryview) -> None:
    address, _ = np.frombuffer(view, np.uint8).__array_interface__["data"]
    if address % PAGE_BYTES or len(view) % PAGE_BYTES:
        raise OffloadError(
            f"a buffer of {len(view)} bytes at address {address:#x} does not suit direct I/O: it "
            f"has to be whole pages and lie at a multiple of {PAGE_BYTES}, as blocks of the arena "
            "do"
        )


def _pieces_of(
    extent: Extent, offset: int, nbytes: int
) -> Iterator[tuple[StripePiece, int, int, int]]:
    """Yields (piece, offset in it, offset in the moved range, bytes), in order."""
    end = offset + nbytes
    at = 0
    for piece in extent.pieces:
        low, high = max(offset, at), min(end, at + piece.nbytes)
        if low < high:
            yield piece, low - at, low - offset, high - low
        at += piece.nbytes


def _stripe_speed(directory: Path) -> float:
    """Returns bytes per microsecond for a stripe that is written once and read once."""
    with SpillStore([directory], reserve_bytes=0) as store:
        speed = speed_of(store, STRIPE_SPEED_S)
    return 2 / (1 / speed.write_bytes_per_us + 1 / speed.read_bytes_per_us)
