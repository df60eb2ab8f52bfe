"""What plans let leave, kept on the device while there is room; what comes next, there beforehand.

A plan of one graph says what leaves and what is loaded if the device holds no more than the plan
does. Between graphs there may be more room than that, now and then. An `ActivationCache` uses it:
a tensor that is to leave stays, and is copied out only when its room is wanted for something
that is expected sooner; what left is loaded again before a graph asks for it. So the plan is the
worst case, and what it moves is moved only where that is needed.

So it is with weights that live on the host: what was copied of them stays for whoever wants it
next in the same sweep, and comes beforehand where there is room (`kept_weights`).

The keeper holds at most `limit_bytes` beside what plans count. What it hands out is its own
memory: who gets it may only read, and the graphs around it may not reuse the memory of what they
gave (`lower`). What it knows of the future comes from a forecast (`Foresight`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial
from typing import TypeVar

import torch

from offcompile.runtime.device.interface import Copy, Slot

from .kept import Block, Cached, Foresight, Known, flat, nothing, version_of
from .kept_room import CacheRoom
from .kept_weights import CachedWeights, Weight
from .saved import Moving, Saved

#: so much is noted of executions and their tensors; what was noted first is forgotten first
MOST_NOTES = 65536
Key = TypeVar("Key")
Value = TypeVar("Value")


class ActivationCache(CacheRoom):
    """Of one mover. Safe to call from several threads; `foresight` is called by one at a time."""

    def __init__(self, mover: Moving, foresight: Foresight) -> None:
        super().__init__(mover, foresight)
        self._known: dict[Saved, Known] = {}
        self._by_block: dict[Block, Known] = {}
        #: execution and tag → the lane that it was last loaded by
        self._lanes: dict[tuple[Hashable, str], str] = {}
        #: execution → what it left to the keeper the last time
        self._limits: dict[Hashable, int] = {}
        self._execution: Hashable = None
        self._lends = self._backward = False
        # finalizers take no lock
        self._weights = CachedWeights(
            mover.device, lambda weight: mover.died(partial(self._weight_died, weight))
        )

    # -- executions ------------------------------------------------------------------------------

    def enter(
        self,
        execution: Hashable,
        limit_bytes: int,
        lends: bool = True,
        weights: Iterable[torch.Tensor] | None = (),
        backward: bool = False,
    ) -> None:
        """A graph begins, and leaves so much to the keeper. Returns when it is within that.

        lends: what the graph gives it leaves alone, and what it gets it only reads.
        weights: those that it, and its backward, may fetch; None: it changes some.
        """
        with self._lock:
            self._execution, self._lends, self._backward = execution, lends, backward
            _note(self._limits, execution, limit_bytes)
            goes_on = self._weights.begin(weights, backward)
            old = [k for k in self._kept.values() if k.weight is not None and not goes_on]
        self._give_up(old)
        with self._lock:
            self.foresight.enter(execution)
        self.bound(limit_bytes)
        self.fetch_ahead()

    def leave(self) -> None:
        """The graph is over: what may be needed next begins to come, and its room to be made."""
        with self._lock:
            self.foresight.leave()
            self.mover.count_kept(self.foresight.counters)
            self._weights.end()
            self._execution, self._lends = None, False
            # what comes now is to be there then
            following = self._limits.get(self.foresight.following(), self.limit_bytes)
            self.limit_bytes = min(self.limit_bytes, following)
        self.mover.sweep()  # what has died needs no copy, and its room is free
        self.make_room_ahead()
        self.fetch_ahead()

    def bound(self, limit_bytes: int) -> None:
        """Hold no more than this from now on; returns when that is so."""
        self.limit_bytes = limit_bytes
        with self._lock:
            leaving = [k for k in self._kept.values() if k.leaving]
            over = self._held_bytes - limit_bytes - sum(k.saved.slot.nbytes for k in leaving)
            victims = self._victims(over)
            over -= sum(k.saved.slot.nbytes for k in victims)
            coming = []
            for kept in reversed(self._kept.values()):
                if over > 0 and kept.under_way:
                    coming.append(kept)
                    over -= kept.saved.slot.nbytes
        for kept in victims:
            self._send(kept)
        self._give_up(coming)
        if self._held_bytes > limit_bytes:
            for kept in [*leaving, *victims]:
                self._await_gone(kept)

    # -- what the mover asks ---------------------------------------------------------------------

    def keep(self, saved: Saved, x: torch.Tensor) -> bool:
        """Whether `x`, which is to leave, stays for now. If so, `settle` comes before it may go."""
        nbytes = saved.slot.nbytes
        with self._lock:
            if not self._lends or x.storage_offset():
                return False
            known = self._name(saved)
            block = known.block
            self.foresight.touch(block, nbytes, reads=False)
            self.foresight.fetching(block, nbytes)
            self.foresight.arrived(block)
            self.foresight.wrote(block)
            leaving = sum(k.saved.slot.nbytes for k in self._kept.values() if k.leaving)
            over = self._held_bytes - leaving + nbytes - self.limit_bytes
            victims = self._victims(over)
            if over > sum(v.saved.slot.nbytes for v in victims):
                self.foresight.leaving(block)
                self.foresight.cleaned(block)
                self.foresight.left(block)
                return False
            self._kept[block] = Cached(block, saved, x)
            self._held_bytes += nbytes
            known.room = victims
        for kept in victims:
            self._send(kept)
        return True

    def settle(self, saved: Saved) -> bool:
        """Return when there is room for a tensor that stays; False if it does not."""
        known = self._known.get(saved)
        if known is None or known.block not in self._kept:
            return False
        room, known.room = known.room, []
        for kept in room:
            self._await_gone(kept)
        return True

    def take(self, saved: Saved, lane: str) -> tuple[torch.Tensor, Copy | None] | None:
        """The tensor's memory on the device, flat, and what to wait for; None: it is not there."""
        with self._lock:
            known = self._known.get(saved)
            if known is None:
                return None
            known.lane = lane
            _note(self._lanes, known.block[:2], lane)
            kept = self._kept.get(known.block)
            # what is leaving is still whole; the plan counts it from now on
            self.foresight.touch(known.block, saved.slot.nbytes)
            if kept is None:
                return None
            if kept.leaving:
                self.foresight.leaving(known.block)
                return flat(kept.tensor), None
            self._hand_out(kept)
            return flat(kept.tensor), kept.copy

    def fetch(self, host: torch.Tensor, tag: str, lane: str) -> tuple[torch.Tensor, Copy] | None:
        """As `take`, for a weight on the host; what is not there begins to come if it may stay."""
        with self._lock:
            weight = self._weights.at(host) if self._lends else None
            slot = None if weight is None else self.mover.device.slot_of(host)
            if weight is None or slot is None:
                return None
            weight.tag, weight.lane = tag, lane
            if self._backward:
                weight.backwards.add(self._execution)
            kept = self._kept.get(weight.block)
        if kept is not None and not kept.is_of(host):
            self._give_up([kept])
        with self._lock:
            kept = self._kept.get(weight.block)
            self.foresight.touch(weight.block, slot.nbytes)
            if kept is None:
                if slot.nbytes > self._free_bytes:
                    return None
                kept = self._begin_copy(weight, host, slot, ahead=False)
            self._hand_out(kept)
            assert kept.copy is not None
            return kept.tensor, kept.copy

    def forget(self, saved: Saved) -> None:
        """The tensor's ticket has died: it is never written any more."""
        with self._lock:
            known = self._known.pop(saved, None)
            if known is None:
                return
            del self._by_block[known.block]
            kept = self._kept.pop(known.block, None)
            self.foresight.dead(known.block)
            if kept is not None:
                self._held_bytes -= saved.slot.nbytes
        if kept is None or kept.copy is None or kept.awaited:
            return
        if self.mover.device.cancel(kept.copy):
            self.mover.copy_cancelled(saved)

    # -- ahead -----------------------------------------------------------------------------------

    def fetch_ahead(self) -> None:
        """Load what is expected next, while there is room."""
        with self._lock:
            free = self._free_bytes
            for wanted in self.foresight.predictions(free):
                if wanted.nbytes > free:
                    continue
                weight = self._weights.of_block.get(wanted.block)
                if weight is not None:
                    found = self._weights.ahead(weight, wanted.execution)
                    if found is not None and found[1].nbytes <= free:
                        self._begin_copy(weight, *found, ahead=True)
                        free -= found[1].nbytes
                    continue
                known = self._by_block.get(wanted.block)
                lane = None if known is None else known.lane or self._lanes.get(known.block[:2])
                if known is None or lane is None:
                    continue
                slot = known.saved.slot
                buffer = self.mover.device.allocate(slot, nothing)
                self._begin_in(Cached(known.block, known.saved, buffer), lane, ahead=True)
                free -= slot.nbytes

    def make_room_ahead(self) -> None:
        """Begin copying out what is needed later than something that does not fit beside it.

        What may go without a copy goes for all that the next run in want of room needs.
        """
        victims: list[Cached] = []
        with self._lock:
            position: int | None = None
            while (short := self.foresight.shortfall(self._free_bytes)) is not None:
                wanted, missing = short
                weight = self._weights.of_block.get(wanted.block)
                if weight is not None and not self._weights.in_sweep(weight, wanted.execution):
                    break
                if position not in (None, wanted.due[0]):
                    break
                position = wanted.due[0]
                chosen = [self._kept.get(v.block) for v in self.foresight.victims(missing, wanted)]
                victims = self._mark_leaving([k for k in chosen if k is not None])
                if not victims or any(k.leaving for k in victims):
                    break
        for kept in victims:
            self._send(kept)

    def execution_of(self, saved: Saved) -> Hashable:
        """The one that the tensor left in; None: not known."""
        known = self._known.get(saved)
        return None if known is None else known.block[0]

    def bytes_of(self, execution: Hashable) -> int:
        """What it holds of the tensors that left in an execution."""
        with self._lock:
            mine = (k for k in self._kept.values() if k.weight is None and k.block[0] == execution)
            return sum(k.saved.slot.nbytes for k in mine)

    # -- inside ----------------------------------------------------------------------------------

    def _begin_copy(self, weight: Weight, host: torch.Tensor, slot: Slot, ahead: bool) -> Cached:
        # the alias keeps the memory, which would go round with another content if it died
        saved = self.mover.saved_on_host(flat(host), slot, weight.tag, weight.lane)
        buffer = self.mover.device.allocate(slot, nothing)
        kept = Cached(weight.block, saved, buffer, weight=weight, version=version_of(host))
        self._begin_in(kept, weight.lane, ahead)
        return kept

    def _weight_died(self, weight: Weight) -> None:
        with self._lock:
            self._weights.forget(weight)
            kept = self._kept.get(weight.block)
        if kept is not None:
            self._give_up([kept], waits=False)  # this may be a lane
        with self._lock:
            self.foresight.dead(weight.block)

    def _name(self, saved: Saved) -> Known:
        number = 0
        while (block := (self._execution, saved.tag, number)) in self._by_block:
            number += 1
        known = self._known[saved] = self._by_block[block] = Known(block, saved)
        return known


def _note(notes: dict[Key, Value], key: Key, value: Value) -> None:
    notes[key] = value
    if len(notes) > MOST_NOTES:
        del notes[next(iter(notes))]
