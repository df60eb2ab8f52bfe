"""Lets tests and tools look at tensors on the thread that evicts them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

#: called with a tensor about to be evicted, as compute left it, and the id of its move
Look = Callable[[torch.Tensor, str], None]

# per thread: a look is for the tensors of one run
_here = threading.local()


@contextmanager
def watching(look: Look) -> Iterator[None]:
    """Inside the context, `look` is called with every tensor that this thread evicts.

    An inner context replaces an outer one. `look` must neither change nor keep the tensor.
    """
    outer = getattr(_here, "look", None)
    _here.look = look
    try:
        yield
    finally:
        _here.look = outer


def show(tensor: torch.Tensor, move: str) -> None:
    """Call the thread's `look`, if any. The mover calls this before each eviction."""
    look: Look | None = getattr(_here, "look", None)
    if look is not None:
        look(tensor, move)
