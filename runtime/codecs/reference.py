"""What every codec means, in NumPy and torch: the others are held against it.

It is also what runs where no compiler is to be had. NumPy keeps the interpreter's lock for some of
it, and takes several passes: a few hundred megabytes per second.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .layout import OFFSET_BYTES, ROW, WIDEST_BYTES, Layout
from .refusals import damaged

Array = np.ndarray[Any, np.dtype[Any]]


def bits_of(x: torch.Tensor) -> Array:
    """The elements of a flat tensor as unsigned integers, in place."""
    width = min(x.itemsize, WIDEST_BYTES)
    if not x.numel():
        return np.empty(0, np.dtype(f"<u{width}"))
    whole: Array = x.detach().view(torch.uint8).numpy()
    return whole.view(f"<u{width}")


class Reference:
    """See `engines.Engine` for the contract."""

    name = "NumPy"

    def pack(self, x: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> int:
        bits = bits_of(x if stash is None else x.to(stash))
        layout = Layout(len(bits), bits.itemsize)
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
        layout = Layout(len(bits), bits.itemsize)
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

    def count(self, x: torch.Tensor, rows: Array | None) -> int:
        bits = bits_of(x)
        if rows is not None:
            bits = bits[: len(bits) // ROW * ROW].reshape(-1, ROW)[rows]
        return int(np.count_nonzero(bits))
