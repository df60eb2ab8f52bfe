"""Importing this makes Triton's interpreter round and multiply as devices do; for tests alone.

Left to itself it cuts the low bits off on the way to bfloat16 and the 8-bit types, and multiplies
matrices of bfloat16 as if their bits were integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

KNOWN = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

_unrounded = interpreter._convert_float


def _convert(values: Any, source: Any, target: Any, rounding_mode: Any) -> Any:
    if source not in KNOWN or target not in KNOWN:
        return _unrounded(values, source, target, rounding_mode)
    signed = np.dtype("u1") if values.itemsize == 1 else np.dtype(f"i{values.itemsize}")
    bits = torch.from_numpy(np.array(values, order="C").reshape(-1).view(signed))
    cast = bits.view(KNOWN[source]).to(KNOWN[target])
    # the interpreter keeps floats that NumPy has no type for as unsigned integers
    result = cast.view(BITS[cast.itemsize]).numpy().view(f"u{cast.itemsize}")
    return result.reshape(values.shape)


interpreter._convert_float = _convert

_multiply = interpreter.InterpreterBuilder.create_dot


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    wide = _convert(handle.data, tl.bfloat16, tl.float32, None).view(np.float32)
    return interpreter.TensorHandle(wide, tl.float32)


def _dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
    return _multiply(self, _widened(a), _widened(b), d, precision, imprecise)


interpreter.InterpreterBuilder.create_dot = _dot
