"""The memory of a `Keeper`: the tensors it holds, how they are loaded, and how they are evicted."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable
from functools import partial

from offcompile.passes.correlation.predictor import Predictor
from offcompile.runtime.device.failures import failure
from offcompile.runtime.device.interface import Copy

from .cached import Cached
from .saved import Moving


class CacheRoom:
    """The memory of one mover's keeper. Its methods report every change to `foresight`."""

    def __init__(self, mover: Moving, foresight: Predictor) -> None:
        self.mover, self.foresight = mover, foresight
        self.limit_bytes = 0
        self._lock = threading.RLock()
        self._kept: dict[Hashable, Cached] = {}
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes held now, including tensors that are still being copied out."""
        return self._held_bytes

    @property
    def _free_bytes(self) -> int:
        return self.limit_bytes - self._held_bytes

    def drop_weights(self) -> None:
        """Drop all copies of weights: a step begins that fetches none through the keeper."""
        with self._lock:
            copies = [kept for kept in self._kept.values() if kept.weight is not None]
        self._give_up(copies)

    def _begin_in(self, kept: Cached, lane: str, ahead: bool) -> None:
        nbytes = kept.saved.slot.nbytes
        self._kept[kept.block] = kept
        self._held_bytes += nbytes
        self.foresight.fetching(kept.block, nbytes, prefetch=ahead)
        try:
            arrived = partial(self._arrived, kept)
            kept.copy = self.mover.begin_in(kept.saved, kept.tensor, lane, arrived)
        except BaseException:
            self._drop(kept)
            raise

    def _hand_out(self, kept: Cached) -> None:
        """Give the tensor to a graph, which waits for the copy before it ends."""
        kept.awaited = True
        self.foresight.arrived(kept.block)

    def _give_up(self, chosen: Iterable[Cached], waits: bool = True) -> None:
        """Drop clean tensors and cancel their loads; `waits`: wait for loads that had begun."""
        for kept in chosen:
            with self._lock:
                if self._kept.get(kept.block) is not kept:
                    continue
                self._drop(kept)
            if not kept.under_way:
                continue
            assert kept.copy is not None
            if self.mover.device.cancel(kept.copy):
                self.mover.copy_cancelled(kept.saved)
            elif waits:
                self.mover.device.wait(kept.copy)

    def _victims(self, over_bytes: int) -> list[Cached]:
        if over_bytes <= 0:
            return []
        chosen = [self._kept.get(v.block) for v in self.foresight.victims(over_bytes)]
        return self._mark_leaving([k for k in chosen if k is not None])

    def _mark_leaving(self, chosen: list[Cached]) -> list[Cached]:
        """Start evicting the dirty ones and drop the clean ones at once."""
        for kept in chosen:
            if kept.clean:
                self._drop(kept)
            else:
                kept.leaving = True
                self.foresight.leaving(kept.block)
        return chosen

    def _send(self, kept: Cached) -> None:
        with self._lock:
            if kept.leaving and kept.copy is None:
                ended = partial(self._left, kept)
                kept.copy = self.mover.begin_out(kept.saved, kept.tensor, ended)

    def _await_gone(self, kept: Cached) -> None:
        """Return when the copy out is complete, or when compute has been made to wait for it."""
        copy = kept.copy
        if copy is None or not kept.leaving:
            return
        kept.awaited = kept.saved.awaited = True
        self.mover.device.wait(copy)
        with self._lock:
            dead = self._kept.get(kept.block) is not kept
            if copy.error is None:
                self._drop_if_leaving(kept)
        # if the tensor died, the copy may have been cancelled, and nobody needs it
        if copy.error is not None and not dead:
            raise failure(copy.error, "out", kept.saved.tag, kept.saved.slot)

    def _arrived(self, kept: Cached, copy: Copy) -> None:
        with self._lock:
            if self._kept.get(kept.block) is kept:
                self.foresight.arrived(kept.block)
                if copy.error is not None:  # the next `take` loads it and raises the error
                    self._drop(kept)
            else:
                _let_go(kept)

    def _left(self, kept: Cached, copy: Copy) -> None:
        with self._lock:
            if self._kept.get(kept.block) is not kept:
                _let_go(kept)
            elif copy.error is None:
                self._drop_if_leaving(kept)
            else:
                # the tensor is still here, so nothing is lost; the waiting caller raises
                kept.leaving, kept.copy = False, None
                self.foresight.stays(kept.block)

    def _drop_if_leaving(self, kept: Cached) -> None:
        if kept.leaving and self._kept.get(kept.block) is kept:
            self.foresight.cleaned(kept.block)
            self._drop(kept)

    def _drop(self, kept: Cached) -> None:
        self.foresight.left(kept.block)
        _let_go(kept)
        del self._kept[kept.block]
        self._held_bytes -= kept.saved.slot.nbytes


def _let_go(kept: Cached) -> None:
    """Drop the tensor before `kept` dies: its copy has ended, or compute waits for it."""
    vars(kept).pop("tensor", None)
