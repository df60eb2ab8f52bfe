"""Measures the non-zero share of a tensor, over all of its elements or a sample of its rows."""

from __future__ import annotations

import numpy as np
import torch

from .engines import engine
from .layout import ROW, WIDEST_BYTES

#: with this many rows the estimate is off by less than 0.005 if elements are independent
SAMPLE_ROWS = 1024
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GOLDEN = 0.6180339887498949


def density(x: torch.Tensor) -> float:
    """Returns the share of elements with a non-zero bit; 0 for an empty tensor.

    A tensor on another device is counted there, and the call waits for the result.
    """
    return _share(_flat(x), None)


def sampled_density(x: torch.Tensor, rows: int = SAMPLE_ROWS) -> float:
    """Returns the `density` of about `rows` rows of 128, spread over the tensor and always the
    same ones."""
    flat = _flat(x)
    whole = flat.numel() // ROW
    if whole <= rows:
        return _share(flat, None)
    # one row of each of `rows` equal parts, at positions that match no pattern in the data
    part = np.arange(rows)
    picked = ((part + part * _GOLDEN % 1.0) * (whole / rows)).astype(np.int64)
    return _share(flat, picked)


def _flat(x: torch.Tensor) -> torch.Tensor:
    x = x.detach().resolve_conj().resolve_neg()
    return x.as_strided((x.numel(),), (1,)) if _dense(x) else x.reshape(-1)


def _dense(x: torch.Tensor) -> bool:
    """True if the elements fill one range of memory; their order does not affect the count."""
    return x.is_contiguous() or (
        x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)
    )


def _share(flat: torch.Tensor, rows: np.ndarray[tuple[int], np.dtype[np.int64]] | None) -> float:
    if not flat.numel():
        return 0.0
    width = min(flat.itemsize, WIDEST_BYTES)
    if flat.device.type == "cpu":
        found = engine().count(flat, rows)
    else:
        bits = flat.view(_INTEGERS[width])
        if rows is not None:
            whole = bits[: bits.numel() // ROW * ROW].view(-1, ROW)
            bits = whole.index_select(0, torch.from_numpy(rows).to(bits.device))
        found = int(torch.count_nonzero(bits))
    elements = flat.numel() * (flat.itemsize // width)
    return found / (elements if rows is None else len(rows) * ROW)
