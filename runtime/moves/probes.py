"""Lets tests and tools look at tensors on the thread that evicts them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from offcompile.runtime.base.define import current, inside

#: called with a tensor about to be evicted, as compute left it, and the id of its move
Look = Callable[[torch.Tensor, str], None]


@dataclass(frozen=True)
class _Probe:
    """The look at the tensors of one run."""

    look: Look


def watching(look: Look) -> AbstractContextManager[None]:
    """Inside the context, `look` is called with every tensor that this thread evicts.

    An inner context replaces an outer one. `look` must neither change nor keep the tensor.
    """
    return inside(_Probe, _Probe(look))


def show(tensor: torch.Tensor, move: str) -> None:
    """Call the thread's `look`, if any. The mover calls this before each eviction."""
    probe = current(_Probe)
    if probe is not None:
        probe.look(tensor, move)
