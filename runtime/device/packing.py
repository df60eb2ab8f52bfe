"""Packed copies in files: a tensor is packed into staging and written piece by piece.

    tensor    | piece 0 | piece 1 | piece 2 |      whole rows each, of equal size but for the last
    staging   | packed 0   | packed 1    |         each page-aligned; written when no more fits
    file      | packed 0   | packed 1    | packed 2 |              (worst case)                |

The slot has room for the worst case and records the offset and size of each packed piece; only
those bytes are written and read. While the disk is busy with one half of the staging, the lane's
thread packs into the other half, or unpacks from it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle

import torch

from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.base.threads import QueuedTask, TaskQueue
from offcompile.runtime.codecs import ROW, TensorCodec
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.disk.spill_space import Extent
from offcompile.runtime.memory.blocks import MemoryBlock

from .interface import Slot

#: bytes of a tensor packed at a time: each call waits for the GIL when it ends
PIECE_BYTES = 1 << 20
#: upper bound for one lane's staging, both halves
STAGING_BYTES = 4 << 20


@dataclass(frozen=True)
class PackedPiece:
    """Elements [start, start + count) of the tensor: `nbytes` packed, `at` in the extent."""

    start: int
    count: int
    at: int
    nbytes: int

    @property
    def padded_bytes(self) -> int:
        return _pages(self.nbytes)


class PackedSlot(Slot):
    """Room in files for a tensor packed by a codec, whatever the tensor holds."""

    __slots__ = (
        "codec", "dtype", "extent", "nbytes", "numel", "per_piece", "pieces", "store", "tier",
    )  # fmt: skip

    def __init__(
        self,
        store: SpillStore,
        tier: str,
        source: torch.Tensor,
        codec: TensorCodec,
        per_piece: int,
    ) -> None:
        self.store = store
        self.tier = tier
        self.codec = codec
        self.dtype = source.dtype
        self.numel = source.numel()
        self.nbytes = self.numel * source.element_size()
        #: elements per piece, in whole rows
        self.per_piece = per_piece
        #: the pieces written by the last copy out
        self.pieces: tuple[PackedPiece, ...] = ()
        self.extent: Extent = store.allocate(max(self._worst_bytes(), 1))

    @property
    def where(self) -> str:
        return ", ".join(str(directory) for directory in self.store.directories)

    @property
    def crossed_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def worst_piece_bytes(self) -> int:
        """Size in whole pages of a piece in the worst case."""
        return self.worst_bytes_of(min(self.per_piece, self.numel))

    def free(self) -> None:
        self.store.release(self.extent)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(first element, number of elements) of each piece."""
        return ranges(self.numel, self.per_piece)

    def worst_bytes_of(self, count: int) -> int:
        """Size in whole pages of a packed piece of `count` elements in the worst case."""
        return _pages(self.codec.worst_bytes(count, self.dtype))

    def _worst_bytes(self) -> int:
        return sum(self.worst_bytes_of(count) for _, count in self.ranges())


def ranges(numel: int, per_piece: int) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of each piece."""
    for start in range(0, numel, per_piece):
        yield start, min(per_piece, numel - start)


def elements_in(room_bytes: int, codec: TensorCodec, dtype: torch.dtype) -> int:
    """The elements, in whole rows, whose worst case fits `room_bytes`; at least one row."""
    rows = max(room_bytes // (ROW * dtype.itemsize), 1)
    while rows > 1 and codec.worst_bytes(rows * ROW, dtype) > room_bytes:
        rows = min(rows - 1, rows * room_bytes // codec.worst_bytes(rows * ROW, dtype))
    return rows * ROW


def elements_per_piece(staging_bytes: int, codec: TensorCodec, dtype: torch.dtype) -> int:
    """Elements per piece, in whole rows, so that each half of a lane's staging holds a piece."""
    return elements_in(min(PIECE_BYTES, staging_bytes // 2), codec, dtype)


def staging_bytes_for(slot: PackedSlot, most_bytes: int) -> int:
    """The staging for a copy of this slot: all of it, or two halves within `most_bytes`."""
    whole = slot.extent.padded_nbytes
    half = max(most_bytes // 2 // PAGE_BYTES * PAGE_BYTES, slot.worst_piece_bytes)
    return whole if whole <= half else 2 * half


def write(slot: PackedSlot, flat: torch.Tensor, staging: MemoryBlock, disk: TaskQueue) -> None:
    """Pack a flat tensor on the calling thread and write it to the slot on the `disk` thread."""
    halves = _halves(slot, staging)
    writing: deque[QueuedTask] = deque()
    pieces: list[PackedPiece] = []
    at = used = 0  # bytes of the extent written; bytes of the half packed
    room, view = next(halves)
    try:
        for start, count in slot.ranges():
            worst = slot.worst_bytes_of(count)
            if used + worst > room.numel():
                writing.append(disk.add(partial(slot.store.write, slot.extent, at, view[:used])))
                at, used = at + used, 0
                if len(writing) == 2:
                    writing.popleft().result()
                room, view = next(halves)
            nbytes = slot.codec.pack(flat[start : start + count], room[used : used + worst])
            pieces.append(PackedPiece(start, count, at + used, nbytes))
            used += pieces[-1].padded_bytes
        if used:
            slot.store.write(slot.extent, at, view[:used])
        for written in writing:
            written.result()
    finally:
        for written in writing:  # after an error the disk may still be writing
            written.wait()
    slot.pieces = tuple(pieces)


def read(slot: PackedSlot, flat: torch.Tensor, staging: MemoryBlock, disk: TaskQueue) -> None:
    """Fill a flat tensor from the slot; the disk reads ahead by one half of the staging."""
    halves = _halves(slot, staging)
    batches = deque(_batches(slot.pieces, _half_bytes(slot, staging)))
    coming: deque[tuple[list[PackedPiece], torch.Tensor, QueuedTask]] = deque()

    def begin() -> None:
        if batches:
            together, (room, view) = batches.popleft(), next(halves)
            at, end = together[0].at, together[-1].at + together[-1].padded_bytes
            reading = disk.add(partial(slot.store.read, slot.extent, at, view[: end - at]))
            coming.append((together, room, reading))

    begin()
    begin()
    try:
        while coming:
            together, room, reading = coming[0]
            reading.result()
            for piece in together:
                begun = piece.at - together[0].at
                packed = room[begun : begun + piece.nbytes]
                slot.codec.unpack(packed, flat[piece.start : piece.start + piece.count])
            coming.popleft()
            begin()
    finally:
        for _, _, reading in coming:
            reading.wait()


def _half_bytes(slot: PackedSlot, staging: MemoryBlock) -> int:
    """The size of one half, or the whole staging if the whole slot fits."""
    whole = slot.extent.padded_nbytes
    return whole if whole <= staging.nbytes else staging.nbytes // 2 // PAGE_BYTES * PAGE_BYTES


def _halves(slot: PackedSlot, staging: MemoryBlock) -> Iterator[tuple[torch.Tensor, memoryview]]:
    """The halves of the staging, alternating."""
    half, room = _half_bytes(slot, staging), staging.tensor
    starts = range(0, staging.nbytes - half + 1, half)
    return cycle([(room[at : at + half], staging.view[at : at + half]) for at in starts])


def _batches(pieces: tuple[PackedPiece, ...], room_bytes: int) -> Iterator[list[PackedPiece]]:
    """Batches of adjacent pieces that one read loads together."""
    together: list[PackedPiece] = []
    for piece in pieces:
        if together and piece.at + piece.padded_bytes - together[0].at > room_bytes:
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


def _pages(nbytes: int) -> int:
    return page_multiple(nbytes, PAGE_BYTES)
