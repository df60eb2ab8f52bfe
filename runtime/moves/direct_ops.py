"""Ops that write a gradient directly to host memory, so that it never exists on the device.

Each computes the same as an aten op, bit for bit, into memory from `Device.addressable`, and
returns a ticket for it: `ops.host_of` turns the ticket into the gradient, as it does for
`start_store`. Importing this module defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offcompile.runtime.base.define import define
from offcompile.runtime.device import tickets
from offcompile.runtime.device.graphs import CannotCapture

from .registry import runtime_for

aten = torch.ops.aten

#: after the op's own arguments: the gradient's layout in its storage, its tag and its runtime
_PLACE = "SymInt[] size, SymInt[] stride, ScalarType dtype, str tag, str runtime"
SCHEMAS = {
    "store_mm": "(Tensor a, Tensor b, {})",
    "store_bmm": "(Tensor a, Tensor b, {})",
    "store_add": "(Tensor a, Tensor b, Scalar alpha, {})",
    "store_copy": "(Tensor x, {})",
    "store_embedding": "(Tensor grad, Tensor indices, SymInt num_weights, SymInt padding_idx, "
    "bool scale_grad_by_freq, {})",
}


def _kernel(fill: Callable[..., None], zeroed: bool = False) -> Callable[..., torch.Tensor]:
    """An op whose `fill(host, …)` writes the whole gradient or, if `zeroed`, its nonzero part."""

    def store(*args: Any) -> torch.Tensor:
        *own, size, stride, dtype, tag, runtime = args
        numel = 1
        for length in size:
            numel *= length
        mover = runtime_for(runtime).mover
        if zeroed and mover.device.captures:
            raise CannotCapture(
                f"{tag} is written on the host by rows, and the host waits to learn how many there"
                ' are; leave lowering="aot_eager" out, or raise memory until that gradient stays on'
                " the device"
            )
        flat, ticket = mover.store_in_place(numel * dtype.itemsize, tag, zeroed)
        with torch.no_grad():
            fill(flat.view(dtype).as_strided(size, stride), *own)
        mover.stored(flat)
        return ticket

    return store


def _mm(host: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    aten.mm.out(a, b, out=host)


def _bmm(host: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    aten.bmm.out(a, b, out=host)


def _add(host: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float) -> None:
    aten.add.out(a, b, alpha=alpha, out=host)


def _copy(host: torch.Tensor, x: torch.Tensor) -> None:
    host.copy_(x)


def _embedding(
    host: torch.Tensor,
    grad: torch.Tensor,
    indices: torch.Tensor,
    num_weights: int,
    padding_idx: int,
    scale_grad_by_freq: bool,
) -> None:
    """Compute only the looked-up rows on the device; the rest of `host` is zero.

    The same aten op computes them with renumbered rows, so each row still sums the same values in
    the same order.
    """
    rows, places = torch.unique(indices, return_inverse=True)
    padding = (rows == padding_idx).nonzero()
    made = aten.embedding_dense_backward.default(
        grad, places, len(rows), int(padding[0]) if len(padding) else -1, scale_grad_by_freq
    )
    host.index_copy_(0, rows, made)


def _fake(*args: Any) -> torch.Tensor:
    return tickets.fake_ticket()


_FILLS: dict[str, tuple[Callable[..., None], bool]] = {
    "store_mm": (_mm, False),
    "store_bmm": (_bmm, False),
    "store_add": (_add, False),
    "store_copy": (_copy, False),
    "store_embedding": (_embedding, True),
}


store_mm, store_bmm, store_add, store_copy, store_embedding = STORES = tuple(
    define(name, f"{schema.format(_PLACE)} -> Tensor", _kernel(*_FILLS[name]), _fake)
    for name, schema in SCHEMAS.items()
)
