"""The disk tier: extents in unlinked files, striped over directories, written as a log."""

from __future__ import annotations

import itertools
import os
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from offcompile.ir import OffloadError
from offcompile.runtime.base import forks, watchdog
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.base.threads import TaskQueue, Work, side_by_side

from .directories import ELSEWHERE
from .speed import speed_of
from .spill_file import Files, SpillFile, calls_for, part_of
from .striping import Turns, shares, stripe_of

#: how long each disk's speed is measured if there are several directories
STRIPE_SPEED_S = 0.1
_LEAST_STEP_BYTES = 64 << 20
_MOST_STEP_BYTES = 1 << 30
#: approximate limit per system call, so that a fork does not wait long
_CHUNK_BYTES = 8 << 20


#: (file, offset in the file, offset in the moved data, bytes)
Transfer = Callable[[int, int, int, int], None]


class SpillFull(OffloadError):
    """Raised if there is no room for an extent; says where, how much is missing, and the remedy."""


@dataclass(frozen=True)
class StripePiece:
    """A range of one of the files."""

    file: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Extent:
    """Space for `nbytes` in a store: whole pages, in as many pieces as needed."""

    nbytes: int
    pieces: tuple[StripePiece, ...] = field(repr=False)
    number: int

    @property
    def padded_nbytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)


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
        self.capacity_bytes = capacity_bytes
        self._stripe_bytes = stripe_bytes
        self._reserve_bytes = reserve_bytes
        self._elsewhere = elsewhere
        if weights is not None and len(weights) != len(directories):
            raise OffloadError(
                f"{len(weights)} weights for {len(directories)} directories: give one for each"
            )
        self._turns = None if weights is None else Turns(weights)
        #: one queue per file and direction, so that reads do not wait for writes
        self._queues = {
            (at, writing): TaskQueue(f"offcompile-spill-{at}{'w' if writing else 'r'}")
            for at in range(len(self._files))
            for writing in (False, True)
        }
        for queue in self._queues.values():
            weakref.finalize(self, queue.close).atexit = False
        self._numbers = itertools.count()
        self._live: dict[int, Extent] = {}
        # finalizers of tickets release too, and may run at any line here: appending needs no lock
        self._released: deque[Extent] = deque()
        self._used_bytes = self._peak_bytes = 0
        self._bytes_written = self._bytes_read = 0
        self._running = 0
        self._settled = threading.Condition(threading.Lock())
        self._owner = os.getpid()
        self._is_open = True
        forks.watch(self)

    @property
    def used_bytes(self) -> int:
        """Bytes of allocated extents, in whole pages."""
        with self._settled:
            self._take_back()
            return self._used_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak_bytes

    @property
    def file_bytes(self) -> int:
        """Disk space taken by the files: the peak, rounded up to steps of growth."""
        return sum(file.size_bytes for file in self._files)

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
            self._take_back()
            if padded > self._available_bytes(padded):
                raise self._full(nbytes)
            pieces: list[StripePiece] = []
            try:
                self._take(padded, pieces)
                if sum(piece.nbytes for piece in pieces) < padded:
                    raise self._full(nbytes)
            except OffloadError:
                self._add_free(pieces)
                raise
            extent = Extent(nbytes, tuple(pieces), next(self._numbers))
            self._live[extent.number] = extent
            self._used_bytes += padded
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        return extent

    def release(self, extent: Extent) -> None:
        """Free the extent, once, while no move of it runs. Never waits: finalizers may call it."""
        known = self._live.get(extent.number) is extent
        if not known or self._live.pop(extent.number, None) is None:
            raise OffloadError(
                f"extent {extent.number} of {extent.nbytes} bytes is not allocated here: "
                "release each one once, on the store that made it"
            )
        self._released.append(extent)

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

    def _available_bytes(self, enough_bytes: int) -> int:
        """Upper bound on the space available; checked first so that files do not grow in vain."""
        within = sum(file.free.total for file in self._files)
        if within >= enough_bytes:
            return within
        # directories of one file system share its free space
        rooms: dict[int, int] = {}
        for file in self._files:
            rooms[file.device] = max(rooms.get(file.device, 0), file.room_bytes())
        room = sum(rooms.values())
        if self.capacity_bytes is not None:
            left = max(0, self.capacity_bytes - self.file_bytes)
            room = min(room, left - left % PAGE_BYTES)
        return within + room

    def _take(self, padded: int, pieces: list[StripePiece]) -> None:
        """Append to `pieces` up to `padded` bytes, or as many as there are."""
        left = padded
        stripe = stripe_of(padded, len(self._files), self._stripe_bytes)
        while left:
            striped = min(left, stripe)
            piece = self._whole_piece(striped) or self._part_piece(striped)
            if piece is None:
                return
            pieces.append(piece)
            left -= piece.nbytes

    def _whole_piece(self, nbytes: int) -> StripePiece | None:
        """Take one range of `nbytes` in the file whose turn it is, or in the next with room."""
        if self._turns is None:
            self._turns = Turns(shares(self.directories, _stripe_speed))
        for at in self._turns.order(nbytes):
            file = self._files[at]
            start = file.take(nbytes)
            if start is None and self._grow(file, nbytes):
                start = file.take(nbytes)
            if start is not None:
                self._turns.took(at, nbytes)
                return StripePiece(at, start, nbytes)
        return None

    def _part_piece(self, nbytes: int) -> StripePiece | None:
        """Take the largest range left, so that fragmented space is used as well."""
        for file in self._files:
            self._grow(file, PAGE_BYTES, wished_bytes=nbytes)
        at = max(range(len(self._files)), key=lambda i: self._files[i].free.largest())
        taken = self._files[at].free.take_largest(nbytes)
        return None if taken is None else StripePiece(at, *taken)

    def _grow(self, file: SpillFile, at_least_bytes: int, wished_bytes: int | None = None) -> bool:
        """Grow the file, in steps that grow with its size and share the capacity among files."""
        step = min(max(file.size_bytes, _LEAST_STEP_BYTES), _MOST_STEP_BYTES)
        if self.capacity_bytes is not None:
            left = self.capacity_bytes - self.file_bytes
            left -= left % PAGE_BYTES
            if left < at_least_bytes:
                return False
            share = page_multiple(left // len(self._files), PAGE_BYTES)
            step = min(left, max(at_least_bytes, min(step, share)))
            wished_bytes = min(left, wished_bytes or step)
        return file.grow(at_least_bytes, max(at_least_bytes, wished_bytes or step))

    def _full(self, nbytes: int) -> SpillFull:
        within = sum(file.free.total for file in self._files)
        places = ", ".join(
            f"{file.directory} ({file.room_bytes()} bytes can still be taken there, "
            f"{self._reserve_bytes} are left alone)"
            for file in self._files
        )
        bound = "no bound" if self.capacity_bytes is None else f"{self.capacity_bytes} bytes"
        return SpillFull(
            f"no room for {nbytes} bytes in {places}: {self._used_bytes} bytes are in use and "
            f"{within} free in its files, capacity: {bound}. Free space there, raise the capacity, "
            f"or {self._elsewhere}"
        )

    def _take_back(self) -> None:
        while self._released:
            extent = self._released.popleft()
            self._used_bytes -= extent.padded_nbytes
            self._add_free(extent.pieces)

    def _add_free(self, pieces: Sequence[StripePiece]) -> None:
        for piece in pieces:
            self._files[piece.file].free.add(piece.offset, piece.nbytes)

    def _check_range(self, extent: Extent, offset: int, nbytes: int) -> None:
        if self._live.get(extent.number) is not extent:
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
