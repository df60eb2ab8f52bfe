"""Updates that need a whole parameter at once, wherever its states are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .core import MASTER, Core, ParameterEntry
from .layout import flat, is_dense, shaped_like
from .rules import Hyper


def update_whole(
    core: Core,
    entry: ParameterEntry,
    weight: torch.Tensor,
    gradient: torch.Tensor,
    hyper: Hyper,
    grad_scale: torch.Tensor | None,
) -> None:
    """Make one step of one parameter. gradient: flat, in the order of the weight's memory."""
    dense = is_dense(weight)
    weights = flat(weight) if dense else weight.contiguous().view(-1)
    with _states(core, entry) as parts:
        master = parts.pop(MASTER, None)
        if master is not None and entry.agreed != entry.parameter._version:
            agree(master, weights, entry.agreed is None)
        work = weights if master is None else master
        wide = {name: part.to(work.dtype) for name, part in parts.items()}
        core.rule.update(
            [shaped_like(work, weight)],
            [shaped_like(gradient.to(work), weight)],
            {name: [shaped_like(part, weight)] for name, part in wide.items()},
            [] if entry.step is None else [entry.step],
            hyper,
            entry.is_first,
            grad_scale,
        )
        for name, part in parts.items():
            if wide[name] is not part:
                part.copy_(wide[name])
        if master is not None:
            weights.copy_(master)
    if not dense:
        weight.copy_(weights.view(weight.shape))


@contextmanager
def _states(core: Core, entry: ParameterEntry) -> Iterator[dict[str, torch.Tensor]]:
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


def agree(master: torch.Tensor, weight: torch.Tensor, from_nothing: bool) -> None:
    """Copy to the master only the elements of the weight that somebody else has written."""
    here = weight.to(master.device)
    if from_nothing:
        master.copy_(here)
    else:
        kept = master.to(weight.dtype) == here
        master.copy_(torch.where(kept, master, here.to(master.dtype)))
