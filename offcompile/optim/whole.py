"""The states of a parameter whole, for updates that need them at once, wherever they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .core import Core, ParameterEntry


@contextmanager
def whole_states(core: Core, entry: ParameterEntry) -> Iterator[dict[str, torch.Tensor]]:
    """The parameter's states whole, flat; what is written to them is kept.

    States that come in ranges are put together in memory first: one parameter's at a time.
    """
    store, numel = entry.store, entry.local.numel()
    assert store is not None
    copies: tuple[torch.Tensor, ...] = ()
    for r in store.visit(entry.key, write=False):
        if r.stop - r.start == numel:
            break
        copies = copies or tuple(p.new_empty(numel) for p in r.parts)
        for copy, part in zip(copies, r.parts, strict=True):
            copy[r.start : r.stop].copy_(part)
    if copies:
        yield dict(zip(entry.names, copies, strict=True))
    for r in store.visit(entry.key):
        if not copies:  # it is the only range
            yield dict(zip(entry.names, r.parts, strict=True))
        for part, copy in zip(r.parts, copies, strict=bool(copies)):
            part.copy_(copy[r.start : r.stop])
