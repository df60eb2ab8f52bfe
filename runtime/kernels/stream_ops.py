"""Ops for products with a matrix in host memory, which graphs can hold instead of aten's.

They take the arguments of `aten.mm` and `aten.addmm`. They sum in another order, so results differ
in the last bits. Importing this module defines them.
"""

from __future__ import annotations

import torch

from offcompile.runtime import kernels
from offcompile.runtime.base.define import define


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernels.stream_matmul(a, b)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernels.stream_matmul(a, b, bias)


def _fake_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _fake_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _fake_mm(a, b)


stream_mm = define("stream_mm", "(Tensor a, Tensor b) -> Tensor", _mm, _fake_mm, effect=False)
stream_addmm = define(
    "stream_addmm", "(Tensor bias, Tensor a, Tensor b) -> Tensor", _addmm, _fake_addmm, effect=False
)
