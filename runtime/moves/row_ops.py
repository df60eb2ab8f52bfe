"""Ops for pieces of a tensor along its rows: write one into the whole, read one of a tangent.

Autograd fills the tangent of an output that nobody used with zeros, as large as the output. Here a
ticket stands for such a tangent: it holds the tangent, or nothing at all, and `tangent_rows` makes
zeros for one piece at a time. Importing this module defines the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offcompile.runtime.base.define import define
from offcompile.runtime.device import tickets
from offcompile.runtime.device.tickets import fake_ticket as fake_ticket


@dataclass(eq=False)
class Tangent:
    """The gradient of an output; None if the output took no part in the loss."""

    value: torch.Tensor | None
    size: Sequence[int]
    dtype: torch.dtype
    device: torch.device

    def whole(self) -> torch.Tensor:
        if self.value is not None:
            return self.value
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)


def _put_rows(whole: torch.Tensor, piece: torch.Tensor, start: int) -> torch.Tensor:
    whole[start : start + piece.shape[0]].copy_(piece)
    return whole


def _fake_put_rows(whole: torch.Tensor, piece: torch.Tensor, start: int) -> torch.Tensor:
    return whole


def _tangent_rows(
    ticket: torch.Tensor, size: Sequence[int], start: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """`size`: of these rows; `start`: the first of them, with all token dimensions made one."""
    found = tickets.find(ticket, Tangent).value
    if found is None:
        return torch.zeros(size, dtype=dtype, device=device)
    rows = found.reshape(-1, *size[1:])[start : start + size[0]]
    return rows.clone(memory_format=torch.contiguous_format)


def _fake_tangent_rows(
    ticket: torch.Tensor, size: Sequence[int], start: int, dtype: torch.dtype, device: str
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=device)


put_rows = define(
    "put_rows",
    "(Tensor(a!) whole, Tensor piece, int start) -> Tensor(a!)",
    _put_rows,
    _fake_put_rows,
)
tangent_rows = define(
    "tangent_rows",
    "(Tensor ticket, SymInt[] size, int start, ScalarType dtype, str device) -> Tensor",
    _tangent_rows,
    _fake_tangent_rows,
    effect=False,
)
