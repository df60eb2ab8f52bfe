"""Codecs: pack a tensor on its way to slow memory, and unpack it on its return.

All devices share one numerical contract: kernels (`runtime.kernels.bitmask`) unpack tensors that
the CPU packed, and the reverse. `layout` defines the format; `reference` defines its meaning.
"""

from __future__ import annotations

from typing import Protocol

import torch

from offcompile.ir import OffloadError

from .densities import density, sampled_density
from .engines import engine
from .kinds import KINDS, STASHES
from .layout import ROW, PackedLayout

__all__ = [
    "CODEC_NAMES",
    "ROW",
    "STASHES",
    "PackedLayout",
    "TensorCodec",
    "codec",
    "density",
    "engine",
    "sampled_density",
]


class TensorCodec(Protocol):
    """Packs each piece by itself, in rows of 128 elements; the last row may be shorter.

    If `lossless`, unpacking restores every bit. Codecs are stateless and thread-safe; compiled
    code releases the GIL.
    """

    @property
    def name(self) -> str: ...

    @property
    def lossless(self) -> bool: ...

    def takes(self, dtype: torch.dtype) -> bool: ...

    def worst_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Upper bound on the packed bytes of a piece; OffloadError for an unsupported type."""

    def packed_bytes(self, numel: int, dtype: torch.dtype, density: float) -> int:
        """Packed bytes of a piece in which this share of the elements has a non-zero bit."""

    def pack(self, x: torch.Tensor, out: torch.Tensor) -> int:
        """Pack x (flat, contiguous, on the CPU) into out (flat uint8, worst_bytes or more);
        returns the bytes used."""

    def unpack(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        """Unpack `packed` (at least the bytes used) into `out`; OffloadError if it is damaged."""


CODEC_NAMES = tuple(KINDS)


def codec(name: str) -> TensorCodec:
    """Returns the codec of this name: bitmask, fp16, bf16, bitmask+fp16, bitmask+bf16 or sign."""
    if name not in KINDS:
        raise OffloadError(f'there is no codec "{name}": use one of {", ".join(KINDS)}')
    return KINDS[name]
