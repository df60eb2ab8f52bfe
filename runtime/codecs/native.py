"""The codecs in C++, compiled at first use with Inductor's compiler, and cached with it.

They are called through ctypes, which releases the GIL. Compiled code is checked against the
reference before it is used.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.mapping import PAGE_BYTES
from offcompile.runtime.base.small_cpp import library

from .layout import WIDEST_BYTES, PackedLayout
from .reference import Array
from .refusals import damaged

_LANES = ("lanes_512.h", "lanes_256.h", "lanes_64.h")
_SOURCES = ("words.h", *_LANES, "packing.cpp", "pages.cpp", "bits.cpp")
_ROUNDED = {torch.float16: 10, torch.bfloat16: 11}
#: bit patterns of minus infinity and of one
_INFINITY_AND_ONE = {
    torch.float64: (0xFFF0_0000_0000_0000, 0x3FF0_0000_0000_0000),
    torch.float32: (0xFF80_0000, 0x3F80_0000),
    torch.float16: (0xFC00, 0x3C00),
    torch.bfloat16: (0xFF80, 0x3F80),
}
#: with narrower lanes torch's casts are faster, though they occupy its threads
LEAST_BITS_TO_CAST = 256
_POINTER, _INT, _LONG, _BITS = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint64
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "lanes_bits": (_INT, ()),
    "pack": (_LONG, (_INT, _POINTER, _LONG, _POINTER)),
    "unpack": (_LONG, (_INT, _POINTER, _LONG, _POINTER, _LONG)),
    "cast_down": (None, (_INT, _POINTER, _LONG, _POINTER)),
    "cast_up": (None, (_INT, _POINTER, _LONG, _POINTER)),
    "pack_signs": (None, (_INT, _POINTER, _LONG, _BITS, _POINTER)),
    "unpack_signs": (None, (_INT, _POINTER, _LONG, _BITS, _POINTER)),
    "count": (_LONG, (_INT, _POINTER, _LONG, _POINTER, _LONG)),
    "pack_bits": (None, (_INT, _POINTER, _LONG, _BITS, _POINTER, _INT)),
    "unpack_bits": (None, (_POINTER, _LONG, _INT, _POINTER, _INT)),
    "keep": (None, (_INT, _POINTER, _POINTER, _LONG, _POINTER, _INT)),
    "sum_pages": (None, (_POINTER, _LONG, _POINTER)),
}


class Native:
    """Implements `engines.Engine`. The constructor compiles, and raises the compiler's errors."""

    def __init__(self, widest_bits: int = 512) -> None:
        if sys.byteorder != "little":
            raise OffloadError("packed tensors are little-endian, and this processor is not")
        self._calls = _library(widest_bits)
        self.name = f"C++ over {self._calls['lanes_bits']()} bits"

    def pack(self, x: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> int:
        layout = PackedLayout.of(x.numel(), stash or x.dtype)
        code = layout.width if stash is None else _ROUNDED[stash]
        used: int = self._calls["pack"](code, x.data_ptr(), layout.elements, out.data_ptr())
        return used

    def unpack(self, packed: torch.Tensor, out: torch.Tensor, stash: torch.dtype | None) -> None:
        layout = PackedLayout.of(out.numel(), stash or out.dtype)
        code = layout.width if stash is None else _ROUNDED[stash]
        if self._calls["unpack"](
            code, packed.data_ptr(), packed.numel(), out.data_ptr(), layout.elements
        ):
            raise damaged(packed.numel(), layout)

    def cast(self, x: torch.Tensor, out: torch.Tensor) -> None:
        if self._calls["lanes_bits"]() < LEAST_BITS_TO_CAST:
            out.copy_(x)
            return
        down = x.dtype == torch.float32
        call = self._calls["cast_down" if down else "cast_up"]
        code = _ROUNDED[out.dtype if down else x.dtype]
        call(code, x.data_ptr(), x.numel(), out.data_ptr())

    def pack_signs(self, x: torch.Tensor, out: torch.Tensor) -> None:
        infinity, _ = _INFINITY_AND_ONE[x.dtype]
        call = self._calls["pack_signs"]
        call(x.itemsize, x.data_ptr(), x.numel(), infinity, out.data_ptr())

    def unpack_signs(self, packed: torch.Tensor, out: torch.Tensor) -> None:
        _, one = _INFINITY_AND_ONE[out.dtype]
        call = self._calls["unpack_signs"]
        call(out.itemsize, packed.data_ptr(), out.numel(), one, out.data_ptr())

    def pack_bits(self, x: torch.Tensor, out: torch.Tensor) -> None:
        infinity, _ = _INFINITY_AND_ONE.get(x.dtype, (0, 1))
        call, threads = self._calls["pack_bits"], torch.get_num_threads()
        call(x.itemsize, x.data_ptr(), x.numel(), infinity, out.data_ptr(), threads)

    def unpack_bits(self, packed: torch.Tensor, out: torch.Tensor, negated: bool) -> None:
        call, threads = self._calls["unpack_bits"], torch.get_num_threads()
        call(packed.data_ptr(), out.numel(), negated, out.data_ptr(), threads)

    def keep(self, packed: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> None:
        call, threads = self._calls["keep"], torch.get_num_threads()
        call(x.itemsize, packed.data_ptr(), x.data_ptr(), x.numel(), out.data_ptr(), threads)

    def count(self, x: torch.Tensor, rows: Array | None) -> int:
        width = min(x.itemsize, WIDEST_BYTES)
        elements = x.numel() * (x.itemsize // width)
        picked = None if rows is None else np.ascontiguousarray(rows, np.int64)
        found: int = self._calls["count"](
            width,
            x.data_ptr(),
            elements,
            None if picked is None else picked.ctypes.data,
            0 if picked is None else len(picked),
        )
        return found

    def sum_pages(self, pages: Array) -> Array:
        sums = np.empty(pages.size // PAGE_BYTES, np.uint64)
        self._calls["sum_pages"](pages.ctypes.data, len(sums), sums.ctypes.data)
        return sums


@cache
def _library(widest_bits: int) -> dict[str, Any]:
    sources = [Path(__file__).with_name(name).read_text() for name in _SOURCES]
    loaded = library("\n".join([f"#define WIDEST {widest_bits}", *sources]))
    calls = {}
    for name, (result, arguments) in _SIGNATURES.items():
        call = getattr(loaded, f"codecs_{name}")
        call.restype, call.argtypes = result, arguments
        calls[name] = call
    return calls
