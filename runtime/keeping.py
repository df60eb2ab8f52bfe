"""What plans let leave, kept on the device while there is room; what comes next, there beforehand.

A plan of one graph says what leaves and what is loaded if the device holds no more than the plan
does. Between graphs there may be more room than that, now and then. A `Keeper` uses it: a tensor
that is to leave stays, and is copied out only when its room is wanted for something that is
expected sooner; what left is loaded again before a graph asks for it. So the plan is the worst
case, and what it moves is moved only where that is needed.

The keeper holds at most `limit_bytes` beside what plans count. What it hands out is its own
memory: who gets it may only read, and the graphs around it may not reuse the memory of what they
gave (`lower`). What it knows of the future comes from a forecast (`Foresight`).
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .device import Copy
from .failures import failure

if TYPE_CHECKING:
    from .mover import Mover, Saved

#: execution, tag, and which of the tensors of that name that are alive
Block = tuple[Hashable, str, int]


class Foresight(Protocol):
    """What the keeper asks and tells; `offcompile.passes.correlation.Predictor` is one."""

    def enter(self, execution: Hashable) -> None: ...
    def leave(self) -> None: ...
    def touch(self, block: Any, nbytes: int, reads: bool = True) -> str: ...
    def wrote(self, block: Any) -> None: ...
    def dead(self, block: Any) -> int: ...
    def predictions(self, free_bytes: int, limit: int | None = None) -> Sequence[Any]: ...
    def shortfall(self, free_bytes: int) -> tuple[Any, int] | None: ...
    def victims(self, needed_bytes: int, wanted: Any = None) -> Sequence[Any]: ...
    def fetching(self, block: Any, nbytes: int, prefetch: bool = False) -> None: ...
    def arrived(self, block: Any) -> None: ...
    def leaving(self, block: Any) -> None: ...
    def stays(self, block: Any) -> None: ...
    def cleaned(self, block: Any) -> None: ...
    def left(self, block: Any) -> None: ...


@dataclass(eq=False)
class _Kept:
    """A tensor on the device that no plan counts."""

    block: Block
    saved: Saved
    tensor: torch.Tensor
    #: on its way in, or out
    copy: Copy | None = None
    leaving: bool = False
    #: compute may be queued behind the copy: it can no longer be cancelled
    awaited: bool = False


@dataclass(eq=False)
class _Known:
    """A tensor whose ticket lives, wherever it is."""

    block: Block
    saved: Saved
    #: by which it comes back, once that is known
    lane: str | None = None
    #: copies that make room for it
    room: list[_Kept] = field(default_factory=list)


class Keeper:
    """Of one mover. Safe to call from several threads; `foresight` is called by one at a time."""

    def __init__(self, mover: Mover, foresight: Foresight) -> None:
        self.mover, self.foresight = mover, foresight
        self.limit_bytes = 0
        self._lock = threading.RLock()
        self._kept: dict[Block, _Kept] = {}
        self._known: dict[Saved, _Known] = {}
        self._by_block: dict[Block, _Known] = {}
        #: execution and tag → the lane that it was last loaded by
        self._lanes: dict[tuple[Hashable, str], str] = {}
        self._execution: Hashable = None
        self._lends = False
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What it holds now, with what is still on its way out."""
        return self._held_bytes

    # -- executions ------------------------------------------------------------------------------

    def enter(self, execution: Hashable, limit_bytes: int, lends: bool = True) -> None:
        """A graph begins, and leaves so much to the keeper. Returns when it is within that.

        lends: what the graph gives it leaves alone, and what it gets it only reads.
        """
        with self._lock:
            self._execution, self._lends = execution, lends
            self.foresight.enter(execution)
        self.bound(limit_bytes)
        self.fetch_ahead()

    def leave(self) -> None:
        """The graph is over: what may be needed next begins to come, and its room to be made."""
        with self._lock:
            self.foresight.leave()
            self._execution, self._lends = None, False
        self.make_room_ahead()
        self.fetch_ahead()

    def bound(self, limit_bytes: int) -> None:
        """Hold no more than this from now on; returns when that is so."""
        self.limit_bytes = limit_bytes
        with self._lock:
            leaving = [k for k in self._kept.values() if k.leaving]
            over = self._held_bytes - limit_bytes - sum(k.saved.slot.nbytes for k in leaving)
            victims = self._victims(over)
        for kept in victims:
            self._send(kept)
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
            self._kept[block] = _Kept(block, saved, x)
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
            known.lane = self._lanes[known.block[:2]] = lane
            kept = self._kept.get(known.block)
            # what is leaving is still whole; the plan counts it from now on
            self.foresight.touch(known.block, saved.slot.nbytes)
            if kept is None:
                return None
            if kept.leaving:
                self.foresight.leaving(known.block)
                return _flat(kept.tensor), None
            kept.awaited = True
            return _flat(kept.tensor), kept.copy

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
        started: list[tuple[_Kept, str]] = []
        with self._lock:
            free = self.limit_bytes - self._held_bytes
            for wanted in self.foresight.predictions(free):
                known = self._by_block.get(wanted.block)
                if known is None or wanted.nbytes > free:
                    continue
                lane = known.lane or self._lanes.get(known.block[:2])
                if lane is None:
                    continue
                slot = known.saved.slot
                buffer = self.mover.device.allocate(slot, _nothing)
                kept = _Kept(known.block, known.saved, buffer)
                self._kept[known.block] = kept
                self._held_bytes += slot.nbytes
                free -= slot.nbytes
                self.foresight.fetching(known.block, slot.nbytes, prefetch=True)
                started.append((kept, lane))
                kept.copy = self.mover.begin_in(
                    known.saved, buffer, lane, partial(self._arrived, kept)
                )

    def make_room_ahead(self) -> None:
        """Begin copying out what is needed later than something that does not fit beside it."""
        with self._lock:
            short = self.foresight.shortfall(self.limit_bytes - self._held_bytes)
            if short is None:
                return
            wanted, missing = short
            chosen = [self._kept.get(v.block) for v in self.foresight.victims(missing, wanted)]
            victims = self._mark_leaving([k for k in chosen if k is not None])
        for kept in victims:
            self._send(kept)

    def execution_of(self, saved: Saved) -> Hashable:
        """The one that the tensor left in; None: not known."""
        known = self._known.get(saved)
        return None if known is None else known.block[0]

    # -- inside ----------------------------------------------------------------------------------

    def _name(self, saved: Saved) -> _Known:
        number = 0
        while (block := (self._execution, saved.tag, number)) in self._by_block:
            number += 1
        known = self._known[saved] = self._by_block[block] = _Known(block, saved)
        return known

    def _victims(self, over_bytes: int) -> list[_Kept]:
        if over_bytes <= 0:
            return []
        chosen = [self._kept.get(v.block) for v in self.foresight.victims(over_bytes)]
        return self._mark_leaving([k for k in chosen if k is not None])

    def _mark_leaving(self, chosen: list[_Kept]) -> list[_Kept]:
        """Those that have to be written begin to leave; clean ones are gone at once."""
        for kept in chosen:
            if kept.saved.written:
                self._drop(kept)
            else:
                kept.leaving = True
                self.foresight.leaving(kept.block)
        return chosen

    def _send(self, kept: _Kept) -> None:
        if kept.leaving and kept.copy is None:
            kept.copy = self.mover.begin_out(kept.saved, kept.tensor, partial(self._left, kept))

    def _await_gone(self, kept: _Kept) -> None:
        """Return when a tensor's copy out is complete, or compute is made to wait for it."""
        copy = kept.copy
        if copy is None or not kept.leaving:
            return
        kept.awaited = kept.saved.awaited = True
        self.mover.device.wait(copy)
        if copy.error is not None:
            raise failure(copy.error, "out", kept.saved.tag, kept.saved.slot)
        with self._lock:
            self._drop_if_leaving(kept)

    def _arrived(self, kept: _Kept, copy: Copy) -> None:
        with self._lock:
            if self._kept.get(kept.block) is kept:
                self.foresight.arrived(kept.block)
                if copy.error is not None:  # who asks for it will load it, and hear why not
                    self._drop(kept)

    def _left(self, kept: _Kept, copy: Copy) -> None:
        with self._lock:
            if copy.error is None:
                self._drop_if_leaving(kept)
            elif self._kept.get(kept.block) is kept:
                # it is still here, and nothing is lost; who wanted its room hears of it
                kept.leaving, kept.copy = False, None
                self.foresight.stays(kept.block)

    def _drop_if_leaving(self, kept: _Kept) -> None:
        if kept.leaving and self._kept.get(kept.block) is kept:
            self.foresight.cleaned(kept.block)
            self._drop(kept)

    def _drop(self, kept: _Kept) -> None:
        self.foresight.left(kept.block)
        del self._kept[kept.block]
        self._held_bytes -= kept.saved.slot.nbytes


def _nothing() -> None:
    """Nobody counts the keeper's memory but the keeper."""


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a dense tensor, as they lie in its storage."""
    storage = tensor.untyped_storage()
    nbytes = tensor.numel() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(storage, 0, (nbytes,), (1,))
