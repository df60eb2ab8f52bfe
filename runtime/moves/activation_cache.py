"""Keeps evicted tensors on the device while there is room, and prefetches those needed next.

A plan of one graph says which tensors are evicted and reloaded if the device holds no more than the
plan allows. Now and then there is more room than that between graphs. An `ActivationCache` uses
it: an evicted tensor stays, and is copied out only when a tensor that is expected sooner needs its
room; evicted tensors are reloaded before a graph asks for them. So the plan is the worst case, and
its copies are made only where they are needed.

Weights that live on the host are treated alike: a copy of one stays for the next reader in the same
sweep, and is prefetched if there is room (`cached_weights`).

The keeper holds at most `limit_bytes` beyond the memory that plans count. The buffers that it hands
out remain its own: graphs may only read them, and must not reuse the buffers of tensors that they
gave to the keeper (`lower`). It learns about the future from a forecast (`Predictor`).

Once the executions of a whole step have come in the same order twice, the step is planned as one,
and the cache obeys that plan (`StepTable`) instead of the forecast: a tensor stays, or it leaves at
once and is loaded behind the execution that the plan names. The first execution or tensor out of
order ends that for the step, and the forecast, which goes on learning meanwhile, decides again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial
from typing import TypeVar

import torch

from offcompile.passes.correlation.predictor import Predictor
from offcompile.passes.correlation.rooms import RoomForecast
from offcompile.passes.step.follow import Planner, StepFollower
from offcompile.passes.step.record import RecordedStep, TensorKey
from offcompile.passes.step.table import StepTable
from offcompile.runtime.base.counters import now_ns
from offcompile.runtime.device.interface import Copy, Slot
from offcompile.runtime.device.streams import flat_bytes

from .cache_room import CacheRoom
from .cached import Cached, CacheNote, nothing, version_of
from .cached_weights import CachedWeights, Weight
from .saved import Moving, Saved

#: most entries in the keeper's notes on executions and their tensors; the oldest are dropped first
MOST_NOTES = 65536
Key = TypeVar("Key")
Value = TypeVar("Value")


def _no_plan(step: RecordedStep) -> StepTable | None:
    return None


class ActivationCache(CacheRoom):
    """The cache of one mover. Thread-safe; calls to `foresight` and `steps` are serialized.

    plan_step: plans a whole step that comes again; without it the forecast decides everything.
    """

    def __init__(self, mover: Moving, foresight: Predictor, plan_step: Planner = _no_plan) -> None:
        super().__init__(mover, foresight)
        self.steps = StepFollower(lambda: now_ns() / 1000 - mover.waited_us, plan_step)
        self._known: dict[Saved, CacheNote] = {}
        self._by_block: dict[Hashable, CacheNote] = {}
        #: (execution, tag) → the lane that last loaded it
        self._lanes: dict[tuple[Hashable, str], str] = {}
        self._rooms = RoomForecast()
        self._execution: Hashable = None
        self._lends = self._backward = self._counts_saved = False
        # finalizers take no lock
        self._weights = CachedWeights(
            mover.device, lambda weight: mover.died(partial(self._weight_died, weight))
        )

    # -- executions ------------------------------------------------------------------------------

    def step_begins(self) -> bool:
        """True if a graph that starts now starts a step: nothing saved is alive."""
        self.mover.sweep()
        return self.steps.record.begins

    def enter(
        self,
        execution: Hashable,
        limit_bytes: int,
        lends: bool = True,
        weights: Iterable[torch.Tensor] | None = (),
        backward: bool = False,
        own_bytes: int | None = None,
    ) -> None:
        """Start a graph that leaves `limit_bytes` to the keeper. Returns when it holds no more.

        lends: the graph only reads the tensors it gets, and leaves those it gave alone.
        weights: those that the graph and its backward may fetch; None if it changes some.
        own_bytes: bytes of the limit for tensors that this execution saves or reads, all of which
        its plan includes; None: its plan does not.
        """
        self.mover.sweep()
        with self._lock:
            self._execution, self._lends, self._backward = execution, lends, backward
            counts_own = own_bytes is not None
            self._counts_saved = counts_own and not backward
            room_bytes = limit_bytes - (own_bytes or 0)
            self._rooms.enter(execution, room_bytes, backward, counts_own, self.steps.record.begins)
            self.steps.enter(execution, room_bytes, backward, counts_own)
            goes_on = self._weights.begin(weights, backward)
            old = [k for k in self._kept.values() if k.weight is not None and not goes_on]
        self._give_up(old)
        with self._lock:
            self.foresight.enter(execution)
        self.bound(limit_bytes)
        self.fetch_ahead()

    def leave(self) -> None:
        """End the graph, prefetch for the next one and start making room for it."""
        with self._lock:
            self.foresight.leave()
            self.mover.count_kept(self.foresight.counters)
            self._weights.end()
            self._execution, self._lends = None, False
            leaving, room = self.steps.leave(), self.steps.room_after()
            if room is None:
                # tensors loaded now must still fit when the next graph runs
                room = self._rooms.after(self.foresight.following(), self._reads_next())
            self.limit_bytes = room
        self.mover.sweep()  # tensors that have died need no copy, and their room is free
        self._evict(leaving)
        self.make_room_ahead()
        self.fetch_ahead()

    def bound(self, limit_bytes: int) -> None:
        """Hold at most `limit_bytes` from now on; returns when that is true."""
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
        for kept in [*leaving, *victims]:
            if self._held_bytes > limit_bytes:
                self._await_gone(kept)

    def _reads_next(self) -> int:
        """Bytes of saved tensors that the execution expected next will read."""
        found = (self._by_block.get(block) for block in self.foresight.read_next())
        return sum(known.saved.slot.nbytes for known in found if known is not None)

    # -- interface for the mover -----------------------------------------------------------------

    def keep(self, saved: Saved, x: torch.Tensor) -> bool:
        """True if the evicted tensor `x` stays for now; then call `settle` before dropping it."""
        nbytes = saved.slot.nbytes
        with self._lock:
            if not self._lends or x.storage_offset():
                return False
            known = self._name(saved)
            block = known.block
            stays = self.steps.saved(block, saved.tag, nbytes)
            self.foresight.touch(block, nbytes, reads=False)
            self.foresight.fetching(block, nbytes)
            self.foresight.arrived(block)
            self.foresight.wrote(block)
            if stays is not None and self._counts_saved:
                self.limit_bytes += nbytes
            leaving = [k for k in self._kept.values() if k.leaving]
            over = self._held_bytes + nbytes - self.limit_bytes
            if stays is not False:
                over -= sum(k.saved.slot.nbytes for k in leaving)
            victims = [] if self.steps.table and not stays else self._victims(over)
            if over > sum(v.saved.slot.nbytes for v in victims):
                self.foresight.leaving(block)
                self.foresight.cleaned(block)
                self.foresight.left(block)
                if stays:
                    self.steps.lose()  # there is less room than the table was made for
                return False
            kept = self._kept[block] = Cached(block, saved, x)
            self._held_bytes += nbytes
            known.room = [*victims, *leaving] if stays else victims
            if stays is False:
                victims = self._mark_leaving([kept])
        for kept in victims:
            self._send(kept)
        return True

    def settle(self, saved: Saved) -> bool:
        """Return when there is room for a tensor that stays; False if it does not stay."""
        known = self._known.get(saved)
        if known is None or known.block not in self._kept:
            return False
        room, known.room = known.room, []
        for kept in room:
            if self.steps.table is None or self._held_bytes > self.limit_bytes:
                self._await_gone(kept)
        return True

    def take(self, saved: Saved, lane: str) -> tuple[torch.Tensor, Copy | None] | None:
        """The tensor's flat buffer on the device and the copy to wait for; None if not there."""
        with self._lock:
            known = self._known.get(saved)
            if known is None:
                return None
            known.lane = lane
            _note(self._lanes, known.block[:2], lane)
            kept = self._kept.get(known.block)
            # a tensor being copied out is still intact; the plan counts it from now on
            self.foresight.touch(known.block, saved.slot.nbytes)
            self.steps.read(known.block)
            if kept is None:
                return None
            if not kept.leaving or self._call_back(kept):
                self._hand_out(kept)
                return flat_bytes(kept.tensor), kept.copy
            self.foresight.leaving(known.block)
            tensor, copy = kept.tensor, kept.copy
        if copy is not None:  # else its memory could go round again before the copy has ended
            self.mover.device.wait(copy)
        return flat_bytes(tensor), None

    def fetch(self, host: torch.Tensor, tag: str, lane: str) -> tuple[torch.Tensor, Copy] | None:
        """Like `take`, for a weight on the host; starts loading it if it is not there and fits."""
        with self._lock:
            weight = self._weights.at(host) if self._lends else None
            slot = None if weight is None else self.mover.device.slot_of(host)
            if weight is None or slot is None:
                return None
            weight.tag, weight.lane = tag, lane
            self.steps.spoil()
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
        """Drop a tensor whose ticket has died; it no longer needs to be copied out."""
        with self._lock:
            known = self._known.pop(saved, None)
            if known is None:
                return
            del self._by_block[known.block]
            kept = self._kept.pop(known.block, None)
            self.foresight.dead(known.block)
            self.steps.record.dead(known.block)
            if kept is not None:
                self._held_bytes -= saved.slot.nbytes
        if kept is None or kept.copy is None or kept.awaited:
            return
        if self.mover.device.cancel(kept.copy):
            self.mover.copy_cancelled(saved)

    # -- prefetching and early eviction ----------------------------------------------------------

    def fetch_ahead(self) -> None:
        """Prefetch the tensors expected next, while there is room."""
        with self._lock:
            if self.steps.table is not None:
                self._fetch_due()
                return
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
                if known is not None and self._load(known):
                    free -= wanted.nbytes

    def make_room_ahead(self) -> None:
        """Start evicting tensors that are needed later than one that does not fit beside them.

        Clean tensors are dropped for everything that the next execution short of room needs.
        """
        victims: list[Cached] = []
        with self._lock:
            if self.steps.table is not None:
                return
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
        """The execution that evicted the tensor; None if unknown."""
        known = self._known.get(saved)
        return None if known is None else known.block[0]

    def bytes_of(self, execution: Hashable) -> int:
        """Bytes held of tensors that this execution evicted."""
        with self._lock:
            mine = (k for k in self._kept.values() if k.weight is None and k.block[0] == execution)
            return sum(k.saved.slot.nbytes for k in mine)

    # -- internals -------------------------------------------------------------------------------

    def _call_back(self, kept: Cached) -> bool:
        """Let a tensor stay after all. False if its copy out has begun."""
        if kept.copy is None or not self.mover.device.cancel(kept.copy):
            return False
        self.mover.copy_cancelled(kept.saved)
        kept.leaving, kept.copy = False, None
        self.foresight.stays(kept.block)
        return True

    def _evict(self, keys: Sequence[TensorKey]) -> None:
        """Start evicting the tensors that the table of the step lets go now."""
        with self._lock:
            blocks = [self.steps.record.block_of(key) for key in keys]
            found = [self._kept.get(block) for block in blocks]
            victims = self._mark_leaving([k for k in found if k is not None and not k.leaving])
        for kept in victims:
            self._send(kept)

    def _fetch_due(self) -> None:
        """Start the loads that the table has due, in their order, while there is room."""
        due = self.steps.due
        while due:
            known = self._by_block.get(self.steps.record.block_of(due[0]))
            kept = None if known is None else self._kept.get(known.block)
            if kept is not None and kept.leaving:
                return
            if known is not None and kept is None:
                if known.saved.slot.nbytes > self._free_bytes:
                    return
                self._load(known)
            due.pop(0)

    def _load(self, known: CacheNote) -> bool:
        """Start loading a tensor that has left. False if no graph has loaded it before."""
        lane = known.lane or self._lanes.get(known.block[:2])
        if lane is None:
            return False
        buffer = self.mover.device.allocate(known.saved.slot, nothing)
        self._begin_in(Cached(known.block, known.saved, buffer), lane, ahead=True)
        return True

    def _begin_copy(self, weight: Weight, host: torch.Tensor, slot: Slot, ahead: bool) -> Cached:
        # the alias keeps the memory alive; otherwise it could be reused with other content
        saved = self.mover.saved_on_host(flat_bytes(host), slot, weight.tag, weight.lane)
        buffer = self.mover.device.allocate(slot, nothing)
        kept = Cached(weight.block, saved, buffer, weight=weight, version=version_of(host))
        self._begin_in(kept, weight.lane, ahead)
        return kept

    def _weight_died(self, weight: Weight) -> None:
        with self._lock:
            self._weights.forget(weight)
            kept = self._kept.get(weight.block)
        if kept is not None:
            self._give_up([kept], waits=False)  # may run on a lane's thread, so it must not wait
        with self._lock:
            self.foresight.dead(weight.block)

    def _name(self, saved: Saved) -> CacheNote:
        number = 0
        while (block := (self._execution, saved.tag, number)) in self._by_block:
            number += 1
        known = self._known[saved] = self._by_block[block] = CacheNote(block, saved)
        return known


def _note(notes: dict[Key, Value], key: Key, value: Value) -> None:
    notes[key] = value
    if len(notes) > MOST_NOTES:
        del notes[next(iter(notes))]
