"""Ops on masks of one bit per element, which graphs can save in place of whole activations.

`pack_bits(x)` packs, for floating point, not (x <= 0) (NaN counts as above), and for booleans their
value, in the memory order of the dense x. `unpack_bits` turns the mask into booleans, and
`masked_grad(grad, mask)` computes the gradient of a ReLU without a byte mask in between. Importing
this module defines the ops.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.define import define
from offcompile.runtime.codecs.engines import engine

from . import bits as kernels
from .shapes import dense, flat


def _pack_bits(x: torch.Tensor) -> torch.Tensor:
    if not dense(x):
        raise OffloadError(
            f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} has gaps: bits are packed"
            " of one that fills its memory; make it contiguous"
        )
    mask = x.new_empty((kernels.mask_bytes(x.numel()),), dtype=torch.uint8)
    (engine() if x.device.type == "cpu" else kernels).pack_bits(flat(x), mask)
    return mask


def _unpack_bits(
    mask: torch.Tensor, size: Sequence[int], stride: Sequence[int], negated: bool
) -> torch.Tensor:
    out = mask.new_empty_strided(size, stride, dtype=torch.bool)
    (engine() if mask.device.type == "cpu" else kernels).unpack_bits(mask, flat(out), negated)
    return out


def _masked_grad(grad: torch.Tensor, mask: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    out = grad.new_empty_strided(grad.shape, stride)
    given = grad
    if not dense(grad) or _differs(grad, stride):
        given = out.copy_(grad)  # in the layout of the masked tensor
    if grad.device.type == "cpu":
        engine().keep(mask, flat(given), flat(out))
    else:
        kernels.keep(flat(given), mask, flat(out))
    return out


def _differs(x: torch.Tensor, stride: Sequence[int]) -> bool:
    both = zip(x.shape, x.stride(), stride, strict=True)
    return any(size > 1 and one != other for size, one, other in both)


def _fake_pack_bits(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty((kernels.mask_bytes(x.numel()),), dtype=torch.uint8)


def _fake_unpack_bits(
    mask: torch.Tensor, size: Sequence[int], stride: Sequence[int], negated: bool
) -> torch.Tensor:
    return mask.new_empty_strided(size, stride, dtype=torch.bool)


def _fake_masked_grad(
    grad: torch.Tensor, mask: torch.Tensor, stride: Sequence[int]
) -> torch.Tensor:
    return grad.new_empty_strided(grad.shape, stride)


pack_bits = define("pack_bits", "(Tensor x) -> Tensor", _pack_bits, _fake_pack_bits, effect=False)
unpack_bits = define(
    "unpack_bits",
    "(Tensor mask, SymInt[] size, SymInt[] stride, bool negated) -> Tensor",
    _unpack_bits,
    _fake_unpack_bits,
    effect=False,
)
masked_grad = define(
    "masked_grad",
    "(Tensor grad, Tensor mask, SymInt[] stride) -> Tensor",
    _masked_grad,
    _fake_masked_grad,
    effect=False,
)
#: these run on any data of the right shapes
BIT_OPS = (pack_bits, unpack_bits, masked_grad)
