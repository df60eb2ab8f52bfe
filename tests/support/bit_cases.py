"""Cases for kernels over bits on any device: the interpreter's (CPU) or a real one.

`python bit_cases.py cpu|cuda` runs them all; one line of JSON for each: [name, null or what went
wrong].
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
from bitmask_cases import SMALL, assert_around, inner, room
from codec_cases import BF16, F16, F32, as_bytes, bits
from kernel_cases import Case, run_all

from offcompile.runtime.codecs.reference import Reference
from offcompile.runtime.kernels.bits import (
    keep_launch,
    mask_bytes,
    pack_bits_launch,
    unpack_bits_launch,
)

LENGTHS = (0, 1, 127, 128, 129, 1000, 5003)
FLOATS = (F32, F16, BF16, torch.float64)


def same_gradient(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the last bit; of 16-bit types aten makes signalling NaN quiet, and we leave them."""
    if found.itemsize > 2:
        return torch.equal(as_bytes(found), as_bytes(expected))
    nans = expected.isnan()
    whole = torch.where(nans, 1, found), torch.where(nans, 1, expected)
    return torch.equal(as_bytes(whole[0]), as_bytes(whole[1])) and torch.equal(found.isnan(), nans)


def packs(dtype: torch.dtype, length: int, device: torch.device) -> None:
    x = bits(dtype, length, 0.6, length)
    expected = torch.zeros(mask_bytes(length), dtype=torch.uint8)
    Reference().pack_bits(x, expected)
    packed = room(len(expected), device)
    pack_bits_launch(x.to(device), inner(packed), SMALL).run()
    assert torch.equal(inner(packed).cpu(), expected)
    assert_around(packed.cpu(), "the mask")


def unpacks(length: int, negated: bool, device: torch.device) -> None:
    mask = bits(torch.uint8, mask_bytes(length), 0.9, length)
    expected = torch.empty(length, dtype=torch.bool)
    Reference().unpack_bits(mask, expected, negated)
    back = room(length, device)
    unpack_bits_launch(mask.to(device), inner(back).view(torch.bool), negated, SMALL).run()
    assert torch.equal(inner(back).cpu(), expected.byte())
    assert_around(back.cpu(), "out")


def keeps(dtype: torch.dtype, length: int, device: torch.device) -> None:
    """`keep_launch` makes the gradient of a ReLU, to the last bit."""
    made, grad = bits(dtype, length, 0.6, length), bits(dtype, length, 0.9, length + 1)
    mask = torch.zeros(mask_bytes(length), dtype=torch.uint8)
    Reference().pack_bits(made, mask)
    back = room(grad.nbytes, device)
    out = inner(back).view(dtype)
    keep_launch(grad.to(device), mask.to(device), out, SMALL).run()
    expected = torch.ops.aten.threshold_backward(grad, made, 0)
    assert same_gradient(out.cpu(), expected)
    assert_around(back.cpu(), "out")


def _cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for length in LENGTHS:
        for dtype in (*FLOATS, torch.bool):
            cases[f"packs-{dtype}-{length}"] = partial(packs, dtype, length)
        for negated in (False, True):
            cases[f"unpacks-{negated}-{length}"] = partial(unpacks, length, negated)
        for dtype in FLOATS:
            cases[f"keeps-{dtype}-{length}"] = partial(keeps, dtype, length)
    return {name.replace("torch.", ""): case for name, case in cases.items()}


CASES = _cases()


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        import interpreter_rounding

        assert interpreter_rounding.KNOWN
    sys.exit(1 if run_all(CASES, torch.device(sys.argv[1])) else 0)
