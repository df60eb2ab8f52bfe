"""The reference implementation of every codec in NumPy and torch; others are checked against it.

It also runs if no compiler is available. NumPy holds the GIL for some of it and takes several
passes: a few hundred megabytes per second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from offcompile.runtime.base.mapping import PAGE_BYTES

from .layout import OFFSET_BYTES, ROW, WIDEST_BYTES, PackedLayout
from .refusals import damaged

Array = np.ndarray[Any, np.dtype[Any]]

#: constants of the checksums
_FACTOR, _LANES = np.uint64(0x9E37_79B1_85EB_CA87), 8
_LEFT, _RIGHT = np.uint64(29), np.uint64(35)


def bits_of(x: torch.Tensor) -> Array:
    """Returns a view of a flat tensor's elements as unsigned integers."""
    width = min(x.itemsize, WIDEST_BYTES)
    if not x.numel():
        return np.empty(0, np.dtype(f"<u{width}"))
    whole: Array = x.detach().view(torch.uint8).numpy()
    return whole.view(f"<u{width}")


class Reference:
    """Implements `engines.Engine`."""

    name = "NumPy"

    def pack(self, x: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> int:
        bits = bits_of(x if stash is None else x.to(stash))
        layout = PackedLayout(len(bits), bits.itemsize)
        kept = np.zeros(layout.rows * ROW, np.bool_)
        kept[: len(bits)] = bits != 0
        values = bits[kept[: len(bits)]]
        target = out.numpy()
        target[: layout.masks_at] = 0
        offsets = target[: OFFSET_BYTES * (layout.rows + 1)].view("<u4")
        offsets[1:] = np.cumsum(kept.reshape(-1, ROW).sum(1))
        target[layout.masks_at : layout.values_at] = np.packbits(kept, bitorder="little")
        used = layout.bytes_for(len(values))
        target[layout.values_at : used] = values.view("u1")
        return used

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> None:
        narrow = out if stash is None else torch.empty(out.shape, dtype=stash)
        bits = bits_of(narrow)
        layout = PackedLayout(len(bits), bits.itemsize)
        source = packed.numpy()
        if len(source) < layout.values_at:
            raise damaged(len(source), layout)
        masks = source[layout.masks_at : layout.values_at]
        kept = np.unpackbits(masks, bitorder="little").view(np.bool_)
        total = int(kept.sum())
        offsets = source[: OFFSET_BYTES * (layout.rows + 1)].view("<u4")
        if kept[len(bits) :].any() or offsets[-1] != total or len(source) < layout.bytes_for(total):
            raise damaged(len(source), layout)
        bits[:] = 0
        bits[kept[: len(bits)]] = source[layout.values_at : layout.bytes_for(total)].view(
            bits.dtype
        )
        if stash is not None:
            out.copy_(narrow)

    def cast(self, x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x)

    def pack_signs(self, x: torch.Tensor, out: torch.Tensor) -> None:
        kept = np.zeros(8 * out.numel(), np.bool_)
        kept[: x.numel()] = ~(x <= 0).numpy()
        out.numpy()[:] = np.packbits(kept, bitorder="little")

    def unpack_signs(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        kept = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        out.copy_(torch.from_numpy(kept))

    def pack_bits(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self.pack_signs(x.byte() if x.dtype == torch.bool else x, out)

    def unpack_bits(self, packed: torch.Tensor, out: torch.Tensor, negated: bool) -> None:
        kept = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        out.copy_(torch.from_numpy(kept ^ np.uint8(negated)))

    def keep(self, packed: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        kept = np.unpackbits(packed.numpy(), count=out.numel(), bitorder="little")
        bits_of(out)[:] = np.where(kept, bits_of(x), 0)

    def count(self, x: torch.Tensor, rows: Array | None) -> int:
        bits = bits_of(x)
        if rows is not None:
            bits = bits[: len(bits) // ROW * ROW].reshape(-1, ROW)[rows]
        return int(np.count_nonzero(bits))

    def sum_pages(self, pages: Array) -> Array:
        words = pages.view("<u8").reshape(-1, PAGE_BYTES // (8 * _LANES), _LANES)
        seeds = _FACTOR * np.arange(1, 2 * _LANES, 2, dtype=np.uint64)
        held = np.tile(seeds, (len(words), 1))
        for row in range(words.shape[1]):
            held = _stirred(held ^ words[:, row])
        sums = np.zeros(len(words), np.uint64)
        for lane in range(_LANES):
            sums = _stirred(sums ^ held[:, lane])
        sums[sums == 0] = 1
        return sums


def _stirred(words: Array) -> Array:
    stirred: Array = (words << _LEFT | words >> _RIGHT) * _FACTOR
    return stirred
