"""Selects CUDA matrix products whose weight our kernel reads over the bus better than torch's.

Ordinary kernels read a tile of the weight over the bus again for each tile of rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from offcompile.runtime.kernels import stream_ops, streamable, why_not


def stream_mm(node: fx.Node, hosted: frozenset[int]) -> Any:
    """The replacement for `aten.mm` if only its second matrix is on the host; else None."""
    return stream_ops.stream_mm if hosted == {1} and _fits(node, 1) else None


def stream_addmm(node: fx.Node, hosted: frozenset[int]) -> Any:
    """The replacement for `aten.addmm`, whose bias may be on the host too; else None."""
    plain = not node.kwargs and _bias(node)
    return stream_ops.stream_addmm if plain and 2 in hosted <= {0, 2} and _fits(node, 2) else None


def _fits(node: fx.Node, second: int) -> bool:
    a, b = (_value(node.args[i]) for i in (second - 1, second))
    if a is None or b is None or not streamable(a, b):
        return False
    return torch.cuda.is_available() and why_not(a.device, a.dtype) is None


def _bias(node: fx.Node) -> bool:
    bias, b = _value(node.args[0]), _value(node.args[2])
    return (
        bias is not None
        and b is not None
        and bias.dim() == 1
        and bias.shape[0] == b.shape[1]
        and bias.dtype == b.dtype
        and bias.is_contiguous()
    )


def _value(given: object) -> torch.Tensor | None:
    value = given.meta.get("val") if isinstance(given, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None
