"""Ops for compiled graphs that offer gradients to an optimizer during backward.

`begin_call` in forward notes which parameters the call is bound to; its ticket is saved for
backward, where `offer` hands over one gradient at a time and returns a ticket in its place.
`taken_or_kept` turns that ticket into the gradient for autograd: None if it was taken. Importing
this module defines the ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.define import current, define, inside
from offcompile.runtime.device import tickets
from offcompile.runtime.moves.registry import runtime_for

from . import updates


@dataclass(frozen=True)
class _Bound:
    """The call of a compiled graph that a thread runs. An op gets no parameters from its caller."""

    graph: str = ""
    arguments: Sequence[object] = ()


def calling(graph: str, arguments: Sequence[object]) -> AbstractContextManager[None]:
    """Set the name and the arguments of the compiled graph that runs inside the context."""
    return inside(_Bound, _Bound(graph, arguments))


@dataclass(eq=False)
class Offered:
    """The fate of a gradient: kept for autograd, or taken (None)."""

    kept: torch.Tensor | None


def _begin_call(
    positions: Sequence[int], counted: bool = False, may_update: bool = True
) -> torch.Tensor:
    """See `updates.UpdateCall`."""
    bound = current(_Bound) or _Bound()
    parameters = [bound.arguments[i] for i in positions if i < len(bound.arguments)]
    tensors = [p for p in parameters if isinstance(p, torch.Tensor)]
    if len(tensors) < len(positions):
        raise OffloadError("A compiled forward was run apart from the function that was compiled.")
    return tickets.issue_owned(updates.UpdateCall(bound.graph, tensors, counted, may_update))


def _offer(
    call: torch.Tensor,
    gradient: torch.Tensor,
    position: int,
    size: Sequence[int],
    stride: Sequence[int],
    runtime: str,
) -> torch.Tensor:
    """`position`: index among those of `begin_call`. `size`, `stride`: the parameter's layout."""
    entry = tickets.find(call, updates.UpdateCall)
    if updates.offer(entry, position, gradient):
        return tickets.issue_owned(Offered(None))
    if entry.counted:
        flat = torch.empty(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
    else:
        nbytes = gradient.numel() * gradient.element_size()
        (flat,) = runtime_for(runtime).device.addressable([nbytes])
        flat = flat.view(gradient.dtype)
    kept = _as_adopted(flat, size, stride).copy_(gradient)
    updates.returned(entry, position, kept)
    return tickets.issue_owned(Offered(kept))


def _as_adopted(flat: torch.Tensor, size: Sequence[int], stride: Sequence[int]) -> torch.Tensor:
    """View memory in the layout in which autograd adopts a gradient: the parameter's, or rows if
    that one has gaps."""
    if 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) > flat.numel():
        return flat.view(size)
    return flat.as_strided(size, stride)


def taken_or_kept(ticket: torch.Tensor) -> torch.Tensor | None:
    """The gradient for autograd after an offer; None if it was taken."""
    offered = tickets.find(ticket, Offered)
    kept, offered.kept = offered.kept, None  # autograd adopts a gradient that nobody else holds
    return kept


def _fake_begin_call(
    positions: Sequence[int], counted: bool = False, may_update: bool = True
) -> torch.Tensor:
    return tickets.fake_ticket()


def _fake_offer(
    call: torch.Tensor,
    gradient: torch.Tensor,
    position: int,
    size: Sequence[int],
    stride: Sequence[int],
    runtime: str,
) -> torch.Tensor:
    return tickets.fake_ticket()


begin_call = define(
    "begin_call",
    "(int[] positions, bool counted=False, bool may_update=True) -> Tensor",
    _begin_call,
    _fake_begin_call,
)
offer = define(
    "offer",
    "(Tensor call, Tensor gradient, int position, SymInt[] size, SymInt[] stride, str runtime)"
    " -> Tensor",
    _offer,
    _fake_offer,
)
