"""Chooses the codecs' CPU engine: compiled C++ if it can be built, NumPy otherwise."""

from __future__ import annotations

import warnings
from functools import cache
from threading import Lock
from typing import Any, Protocol

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.base.threads import apart

from .layout import PackedLayout
from .native import Native
from .reference import Reference


class CodecEngine(Protocol):
    """The CPU operations of the codecs.

    Callers have checked that tensors are flat, contiguous, on the CPU, of supported types, and
    large enough. `stash` is a 16-bit type to which float32 is rounded first.
    """

    name: str

    def pack(self, x: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> int: ...

    def unpack(
        self, packed: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None
    ) -> None: ...

    def cast(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = x[i], rounded or widened; a NaN becomes any NaN."""

    def pack_signs(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Pack signs into `out`, which has exactly the packed size; see `kinds.Sign`."""

    def unpack_signs(self, packed: torch.Tensor, out: torch.Tensor) -> None: ...

    def pack_bits(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """Like `pack_signs`, on torch's threads; also packs booleans directly."""

    def unpack_bits(self, packed: torch.Tensor, out: torch.Tensor, negated: bool) -> None:
        """Unpack bits into the booleans `out`, inverted if `negated`."""

    def keep(self, packed: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = x[i] where the bit is 1, and 0 elsewhere; x of 2, 4 or 8 bytes an element."""

    def count(self, x: torch.Tensor, rows: np.ndarray[Any, Any] | None) -> int:
        """Count elements with a non-zero bit, in the whole tensor or in these whole rows."""

    def sum_pages(self, pages: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns a 64-bit checksum, never 0, for each 4096-byte page of a flat uint8 array."""


@cache
def _chosen() -> CodecEngine:
    try:
        return apart(_compiled)
    except Exception as error:
        warnings.warn(
            "codecs run in NumPy, some twenty times slower than compiled code, which cannot be "
            f"had: {type(error).__name__}: {str(error)[:500]}. Install a C++ compiler (g++), or "
            "name one in CXX",
            RuntimeWarning,
            stacklevel=2,
        )
        return Reference()


def _compiled() -> CodecEngine:
    made = Native()
    check_engine(made)
    return made


_choosing = Lock()


def engine() -> CodecEngine:
    """Returns the fastest engine that works here; the first call may compile it, for seconds."""
    if _chosen.cache_info().currsize:
        return _chosen()
    with _choosing:
        return _chosen()


def check_engine(made: CodecEngine) -> None:
    """Raise OffloadError unless the engine's bytes equal the reference's for a small tensor."""
    meant = Reference()
    # a row of zeros, one without zeros, and ragged ends; no NaN, since any NaN is a valid result
    values = torch.arange(-700.0, 701.0).div_(3).relu_()
    values[256:384] = 0.0
    values[384:512] = -1e-41
    for dtype in (torch.uint8, torch.float16, torch.float32, torch.float64):
        _compare(made, meant, values.to(dtype), None)
    for stash in (torch.float16, torch.bfloat16):
        _compare(made, meant, values, stash)
    _compare_bits(made, meant, values)
    pages = values.repeat(5 * PAGE_BYTES // values.nbytes + 1).view(torch.uint8)
    whole = pages[: 5 * PAGE_BYTES].numpy()
    if not np.array_equal(made.sum_pages(whole), meant.sum_pages(whole)):
        raise OffloadError(f"{made.name} adds pages up otherwise than it should on this processor")


def _compare_bits(made: CodecEngine, meant: CodecEngine, values: torch.Tensor) -> None:
    for x in (values, values.half(), values > 1):
        packed, expected = (torch.empty(16 * 11, dtype=torch.uint8) for _ in range(2))
        made.pack_bits(x, packed)
        meant.pack_bits(x, expected)
        truths, meant_truths = torch.empty_like(x, dtype=torch.bool), torch.empty_like(x).bool()
        made.unpack_bits(expected, truths, True)
        meant.unpack_bits(expected, meant_truths, True)
        kept, meant_kept = values.clone(), values.clone()
        made.keep(expected, values, kept)
        meant.keep(expected, values, meant_kept)
        pairs = ((packed, expected), (truths, meant_truths), (kept, meant_kept))
        if not all(torch.equal(one, other) for one, other in pairs):
            raise OffloadError(f"{made.name} makes other bits of {x.dtype} than it should here")


def _compare(
    made: CodecEngine, meant: CodecEngine, x: torch.Tensor, stash: torch.dtype | None
) -> None:
    room = 2 * PackedLayout.of(x.numel(), x.dtype).worst_bytes
    packed, expected = (torch.zeros(room, dtype=torch.uint8) for _ in range(2))
    used = made.pack(x, packed, stash)
    back, meant_back = torch.empty_like(x), torch.empty_like(x)
    same = used == meant.pack(x, expected, stash)
    if same and torch.equal(packed[:used], expected[:used]):
        made.unpack(packed[:used], back, stash)
        meant.unpack(expected[:used], meant_back, stash)
        counted = made.count(x, None) == meant.count(x, None)
        if torch.equal(back.view(torch.uint8), meant_back.view(torch.uint8)) and counted:
            return
    raise OffloadError(f"{made.name} packs {x.dtype} otherwise than it should on this processor")
