"""Packed copies in files: a tensor leaves piece by piece, each packed by itself into staging.

    tensor    | piece 0 | piece 1 | piece 2 |      whole rows each, of equal size but for the last
    staging   | packed 0   | packed 1    |         each at a page; written when no more fits
    file      | packed 0   | packed 1    | packed 2 |              (worst case)                |

The slot has room for the worst case, and keeps where each piece lies and how much it took: only
that is written, and only that is read again. While the disk is busy with one half of the staging,
the lane's thread packs into the other, or unpacks from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .arena import Block
from .device import Slot
from .mapping import PAGE_BYTES, page_multiple
from .spill import Extent, SpillStore

if TYPE_CHECKING:
    from .codecs import Codec

#: elements that codecs take together
ROW = 128
#: of a tensor, packed at a time
PIECE_BYTES = 256 << 10
#: most of one lane's staging, both halves
STAGING_BYTES = 2 << 20


@dataclass(frozen=True)
class Piece:
    """Elements [start, start + count) of the tensor: `nbytes` packed, `at` in the extent."""

    start: int
    count: int
    at: int
    nbytes: int

    @property
    def padded_bytes(self) -> int:
        return _pages(self.nbytes)


class PackedSlot(Slot):
    """Room in files for a tensor as a codec leaves it, whatever the tensor holds."""

    __slots__ = ("codec", "dtype", "extent", "nbytes", "numel", "pieces", "store", "tier")

    def __init__(self, store: SpillStore, tier: str, source: torch.Tensor, codec: Codec) -> None:
        self.store = store
        self.tier = tier
        self.codec = codec
        self.dtype = source.dtype
        self.numel = source.numel()
        self.nbytes = self.numel * source.element_size()
        #: what the last copy out has left there
        self.pieces: tuple[Piece, ...] = ()
        self.extent: Extent = store.allocate(max(self._worst_bytes(), 1))

    @property
    def where(self) -> str:
        return ", ".join(str(directory) for directory in self.store.directories)

    @property
    def crossed_bytes(self) -> int:
        return sum(piece.nbytes for piece in self.pieces)

    @property
    def worst_piece_bytes(self) -> int:
        """Whole pages that any piece fits in."""
        return self._worst_of(min(self._per_piece, self.numel))

    def free(self) -> None:
        self.store.release(self.extent)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """(first element, how many) of each piece to be."""
        for start in range(0, self.numel, self._per_piece):
            yield start, min(self._per_piece, self.numel - start)

    @property
    def _per_piece(self) -> int:
        return max(PIECE_BYTES // self.dtype.itemsize // ROW, 1) * ROW

    def _worst_of(self, count: int) -> int:
        return _pages(self.codec.worst_bytes(count, self.dtype))

    def _worst_bytes(self) -> int:
        whole, rest = divmod(self.numel, self._per_piece)
        return whole * self._worst_of(self._per_piece) + (self._worst_of(rest) if rest else 0)


def staging_bytes_for(slot: PackedSlot) -> int:
    """What a lane wants for a copy of this slot: two halves, each for one piece at least."""
    worst = slot.worst_piece_bytes
    half = max(worst, min(STAGING_BYTES // 2, slot.extent.padded_nbytes) // PAGE_BYTES * PAGE_BYTES)
    return 2 * half


def write(slot: PackedSlot, flat: torch.Tensor, staging: Block) -> None:
    """Pack a flat tensor and put it into the slot, on the calling thread."""
    room, view = staging.tensor(), staging.view
    pieces: list[Piece] = []
    at = used = 0  # of the extent, written; of the staging, packed
    worst = slot.worst_piece_bytes
    for start, count in slot.ranges():
        if used + worst > room.numel():
            slot.store.write(slot.extent, at, view[:used])
            at, used = at + used, 0
        nbytes = slot.codec.pack(flat[start : start + count], room[used : used + worst])
        pieces.append(Piece(start, count, at + used, nbytes))
        used += pieces[-1].padded_bytes
    if used:
        slot.store.write(slot.extent, at, view[:used])
    slot.pieces = tuple(pieces)


def read(slot: PackedSlot, flat: torch.Tensor, staging: Block) -> None:
    """Fill a flat tensor with what the slot holds, on the calling thread."""
    room, view = staging.tensor(), staging.view
    for together in _batches(slot.pieces, room.numel()):
        first, last = together[0], together[-1]
        size = last.at + last.padded_bytes - first.at
        slot.store.read(slot.extent, first.at, view[:size])
        for piece in together:
            begin = piece.at - first.at
            packed = room[begin : begin + piece.nbytes]
            slot.codec.unpack(packed, flat[piece.start : piece.start + piece.count])


def _batches(pieces: tuple[Piece, ...], room_bytes: int) -> Iterator[list[Piece]]:
    """Pieces that are read together: they lie one behind the other."""
    together: list[Piece] = []
    for piece in pieces:
        if together and piece.at + piece.padded_bytes - together[0].at > room_bytes:
            yield together
            together = []
        together.append(piece)
    if together:
        yield together


def _pages(nbytes: int) -> int:
    return page_multiple(nbytes, PAGE_BYTES)
