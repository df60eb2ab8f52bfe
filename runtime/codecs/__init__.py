"""Codecs: what a tensor becomes on its way to slow memory, and how it comes back.

One numerical contract for all devices: what the CPU packs, kernels (`runtime.kernels.bitmask`)
unpack, and the reverse. `layout` says where things lie; `reference` says what it means.
"""

from __future__ import annotations

from typing import Protocol

import torch

from offcompile.ir import OffloadError

from .densities import density, sampled_density
from .engines import engine
from .kinds import KINDS, STASHES
from .layout import ROW, Layout

__all__ = [
    "CODEC_NAMES",
    "ROW",
    "STASHES",
    "Codec",
    "Layout",
    "codec",
    "density",
    "engine",
    "sampled_density",
]


class Codec(Protocol):
    """Packs pieces, each by itself, of whole rows of 128 elements; the last may be ragged.

    Whatever is packed comes back bit for bit if `lossless`. Nothing is kept between calls, and any
    thread may call: compiled code releases the interpreter's lock.
    """

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def takes(self, dtype: torch.dtype) -> bool: ...

    def worst_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes that no piece of this size exceeds; OffloadError for a type it does not take."""

    def packed_bytes(self, numel: int, dtype: torch.dtype, density: float) -> int:
        """Bytes of a piece of which this share of the elements is not zero in bits."""

    def pack(self, x: torch.Tensor, out: torch.Tensor) -> int:
        """x: flat, contiguous, CPU; out: flat uint8 of worst_bytes or more. The bytes used."""

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """packed: at least the bytes used; fills `out`. OffloadError if they are damaged."""


CODEC_NAMES = tuple(KINDS)


def codec(name: str) -> Codec:
    """The codec of this name: bitmask, fp16, bf16, bitmask+fp16, bitmask+bf16 or sign."""
    if name not in KINDS:
        raise OffloadError(f'there is no codec "{name}": use one of {", ".join(KINDS)}')
    return KINDS[name]
