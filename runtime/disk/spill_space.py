"""Space for offloaded data in the files of a store: handed out in stripes, and accounted for.

There are no locks here: the store holds its lock.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple

from .spill_file import SpillFile
from .striping import Measure, Turns, shares, stripe_of

_LEAST_STEP_BYTES = 64 << 20
_MOST_STEP_BYTES = 1 << 30


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


class ExtentTable:
    """The allocated extents, and their bytes in whole pages."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self.live: dict[int, Extent] = {}
        # finalizers of tickets release too, and may run at any line here: appending needs no lock
        self._released: deque[Extent] = deque()
        self.used_bytes = self.peak_bytes = 0

    def add(self, nbytes: int, pieces: Sequence[StripePiece]) -> Extent:
        extent = Extent(nbytes, tuple(pieces), next(self._numbers))
        self.live[extent.number] = extent
        self.used_bytes += extent.padded_nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return extent

    def holds(self, extent: Extent) -> bool:
        return self.live.get(extent.number) is extent

    def release(self, extent: Extent) -> None:
        """Needs no lock; `take_back` counts the extent's bytes as free."""
        if not self.holds(extent) or self.live.pop(extent.number, None) is None:
            raise OffloadError(
                f"extent {extent.number} of {extent.nbytes} bytes is not allocated here: "
                "release each one once, on the store that made it"
            )
        self._released.append(extent)

    def take_back(self, space: SpillSpace) -> None:
        """Give the pieces of released extents back to `space`."""
        while self._released:
            extent = self._released.popleft()
            self.used_bytes -= extent.padded_nbytes
            space.give_back(extent.pieces)


class SpillSpace:
    """The files of a store, which grow as needed and share its capacity.

    weights: the proportions in which files get stripes; None: as `measure` finds at the first use.
    """

    def __init__(
        self,
        files: Sequence[SpillFile],
        capacity_bytes: int | None,
        stripe_bytes: int,
        weights: Sequence[float] | None,
        measure: Measure,
    ) -> None:
        self._files = files
        self.capacity_bytes = capacity_bytes
        self._stripe_bytes = stripe_bytes
        self._turns = None if weights is None else Turns(weights)
        self._measure = measure

    @property
    def file_bytes(self) -> int:
        return sum(file.size_bytes for file in self._files)

    @property
    def free_bytes(self) -> int:
        """Free bytes within the files as they are."""
        return sum(file.free.total for file in self._files)

    def available_bytes(self, enough_bytes: int) -> int:
        """Upper bound on the space available; checked first so that files do not grow in vain."""
        within = self.free_bytes
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

    def take(self, padded: int, pieces: list[StripePiece]) -> None:
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

    def give_back(self, pieces: Sequence[StripePiece]) -> None:
        for piece in pieces:
            self._files[piece.file].free.add(piece.offset, piece.nbytes)

    def _whole_piece(self, nbytes: int) -> StripePiece | None:
        """Take one range of `nbytes` in the file whose turn it is, or in the next with room."""
        if self._turns is None:
            places = [file.directory for file in self._files]
            self._turns = Turns(shares(places, self._measure))
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
