"""Gives room that no plan uses to states of optimizers which nothing has placed.

A plan places states of an optimizer if its graph has all of the optimizer's parameters. A model in
several graphs has no such graph, and a parameter that is used outside of all graphs is enough. Then
states begin beside the device. One whole step shows how much room all its calls leave, and as many
states move there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from offcompile.runtime.states.updates import StatesOwner

#: finished steps before the one that is watched: the first has what is made once, and the second
#: may begin amid measurements of the peak
STEPS_BEFORE = 2
#: part of the budget that stays free, for batches that are larger
SPARE_SHARE = 16


@dataclass
class _Watch:
    """One optimizer. `steps`: those that were over when the watched step began."""

    steps: int
    least_bytes: int | None = None
    is_over: bool = False


class SpareRoom:
    """The room that calls on one device leave."""

    def __init__(self) -> None:
        self._watches: weakref.WeakKeyDictionary[StatesOwner, _Watch] = weakref.WeakKeyDictionary()

    @property
    def is_watched(self) -> bool:
        """True if some step is being watched: `note` each call."""
        return any(not w.is_over and w.steps >= STEPS_BEFORE for w in self._watches.values())

    def note(self, room_bytes: int) -> None:
        """Note the room that a call leaves, at its peak and with all that others hold."""
        for watch in self._watches.values():
            least = watch.least_bytes
            watch.least_bytes = room_bytes if least is None else min(least, room_bytes)

    def filled(
        self,
        owners: Iterable[StatesOwner],
        device: torch.device,
        budget_bytes: int,
        free_bytes: Callable[[], int],
    ) -> int:
        """At the beginning of a call: fill the room if a watched step is over; return the bytes
        that moved. free_bytes: what the allocator never had to give."""
        moved = 0
        for owner in owners:
            steps = owner.steps()
            watch = self._watches.get(owner)
            if watch is None:
                watch = self._watches[owner] = _Watch(steps)
            if watch.is_over or watch.steps == steps:
                continue
            least, watched = watch.least_bytes, watch.steps >= STEPS_BEFORE
            watch.steps, watch.least_bytes = steps, None
            if steps < STEPS_BEFORE or not watched or least is None:
                watch.is_over = steps >= STEPS_BEFORE and not owner.beside_bytes(device)
                continue
            room_bytes = min(least, free_bytes()) - budget_bytes // SPARE_SHARE
            moved += owner.fill(device, room_bytes)
            watch.is_over = True
        return moved
