"""Measures codecs on lanes of the CPU target, where they share the processor with compute."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from offcompile.runtime.codecs import codec
from offcompile.runtime.memory.malloc.heap import heap

from .timing import time_us, undisturbed

#: larger than a core's own caches, in pieces as lanes take them; one small tensor only, because the
#: measurement runs beside a model that already trains
TENSOR_BYTES, PIECE_BYTES = 8 << 20, 256 << 10
MATMUL_SIDE = 512
SECONDS = 0.05


def codec_bytes_per_us(
    names: Sequence[str], nbytes: int = TENSOR_BYTES, seconds: float = SECONDS
) -> dict[str, float]:
    """Raw bytes per microsecond of packing or unpacking, whichever is slower, while matrix products
    keep the processor busy. Half of the float32 elements are zero.

    Call it between steps: it first releases the memory that the heap kept from the last one.
    """
    heap().trim()
    with undisturbed(), _busy():
        x = torch.randn(nbytes // 4, device="cpu").relu_()
        return {name: _rate(name, x, seconds) for name in names}


def _rate(name: str, x: torch.Tensor, seconds: float) -> float:
    how = codec(name)
    elements = min(PIECE_BYTES // x.element_size(), x.numel())
    packed = torch.zeros(how.worst_bytes(elements, x.dtype), dtype=torch.uint8, device="cpu")
    whole = [piece for piece in torch.split(x, elements) if piece.numel() == elements]

    def pack() -> None:
        for piece in whole:
            how.pack(piece, packed)

    def unpack() -> None:
        for piece in whole:
            how.unpack(packed, piece)

    slowest_us = max(time_us(pack, seconds), time_us(unpack, seconds))
    return len(whole) * elements * x.element_size() / slowest_us


class _busy:
    """Another thread multiplies matrices without a pause inside the context."""

    def __enter__(self) -> None:
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._compute, name="offcompile-busy", daemon=True)
        self._thread.start()

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _compute(self) -> None:
        a = torch.ones(MATMUL_SIDE, MATMUL_SIDE, device="cpu")
        out = torch.empty_like(a)
        with torch.no_grad():
            while not self._over.is_set():
                torch.mm(a, a, out=out)
