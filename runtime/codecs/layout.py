"""Defines the format of a packed tensor: row offsets, bit masks, non-zero elements.

Elements are taken as unsigned integers, flat, in rows of 128. A packed tensor is

    offsets   uint32, rows + 1 of them: the number of elements kept in the rows before; the last
              is the number kept in all. Padded with zeros to a multiple of 16 bytes
    masks     16 bytes a row: bit i of byte i // 8 is set if element i has a non-zero bit
    values    the kept elements, contiguous, little-endian
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from offcompile.ir import OffloadError

ROW = 128
MASK_BYTES = ROW // 8
OFFSET_BYTES = 4
ALIGNMENT_BYTES = 16
#: kernels compare offsets as signed 32-bit integers
MOST_ELEMENTS = 2**31 - ROW
#: wider elements are treated as several
WIDEST_BYTES = 8


@dataclass(frozen=True)
class PackedLayout:
    """The layout of a packed tensor of `elements` elements of `width` bytes."""

    elements: int
    width: int

    def __post_init__(self) -> None:
        if self.elements > MOST_ELEMENTS:
            raise OffloadError(
                f"a piece of {self.elements} elements is too long to pack: at most "
                f"{MOST_ELEMENTS} go at once; pack it in pieces of whole rows of {ROW}"
            )

    @staticmethod
    @lru_cache(4096)
    def of(numel: int, dtype: torch.dtype) -> PackedLayout:
        width = min(dtype.itemsize, WIDEST_BYTES)
        return PackedLayout(numel * (dtype.itemsize // width), width)

    @cached_property
    def rows(self) -> int:
        return -(-self.elements // ROW)

    @cached_property
    def masks_at(self) -> int:
        return up_to(OFFSET_BYTES * (self.rows + 1), ALIGNMENT_BYTES)

    @cached_property
    def values_at(self) -> int:
        return self.masks_at + MASK_BYTES * self.rows

    @cached_property
    def worst_bytes(self) -> int:
        return self.bytes_for(self.elements)

    def bytes_for(self, kept: int) -> int:
        """Packed bytes of the tensor if `kept` elements are not zero."""
        return self.values_at + kept * self.width


def up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
