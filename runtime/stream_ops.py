"""Products with a matrix in host memory, as ops that graphs can hold instead of aten's.

They take what `aten.mm` and `aten.addmm` take. Sums begin at another end, so that results differ
in the last bits. Importing this module defines them.
"""

from __future__ import annotations

from typing import Any

import torch

from . import kernels
from .ops import NAMESPACE

# torch gives it no types
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")  # type: ignore[no-untyped-call]


def _mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernels.stream_matmul(a, b)


def _addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return kernels.stream_matmul(a, b, bias)


def _fake_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.new_empty((a.shape[0], b.shape[1]))


def _fake_addmm(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return _fake_mm(a, b)


def _define(schema: str, kernel: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.needs_exact_strides,))
    # autograd has its own backward: these stand in graphs that are differentiated already
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


stream_mm = _define("stream_mm(Tensor a, Tensor b) -> Tensor", _mm, _fake_mm)
stream_addmm = _define(
    "stream_addmm(Tensor bias, Tensor a, Tensor b) -> Tensor", _addmm, _fake_addmm
)
