"""Where things lie in a packed tensor: row offsets, bit masks, non-zero elements.

Elements are taken as unsigned integers, flat, in rows of 128. A packed tensor is

    offsets   uint32, rows + 1 of them: how many elements of the rows before are kept; the last
              is how many are kept in all. Zeros fill up to a multiple of 16 bytes
    masks     16 bytes a row: bit i of byte i // 8 says that element i's bits are not all zero
    values    the elements that are kept, one behind the other, little-endian
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
#: offsets are compared as signed integers of 32 bits by kernels
MOST_ELEMENTS = 2**31 - ROW
#: elements wider than this are taken as several
WIDEST_BYTES = 8


@dataclass(frozen=True)
class Layout:
    """A packed tensor of `elements` elements of `width` bytes."""

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
    def of(numel: int, dtype: torch.dtype) -> Layout:
        width = min(dtype.itemsize, WIDEST_BYTES)
        return Layout(numel * (dtype.itemsize // width), width)

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
        """Bytes of the packed tensor when `kept` elements are not zero."""
        return self.values_at + kept * self.width


def up_to(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
