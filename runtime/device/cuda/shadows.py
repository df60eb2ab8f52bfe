"""Tensors of the device that lie in host memory, on blocks of the arena: weights and gradients.

They go round like memory of a caching allocator. What died is handed out again at once, and the
compute stream of its new holder waits for all that may still use it: kernels given to compute
before, and copies of the lanes. It goes back to the arena, where anybody may get it, also the host
itself, only when the host has seen all of that end.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch

from offcompile.runtime.device.owners import address_of
from offcompile.runtime.device.streams import Event, Stream, Streams, when_storage_dies
from offcompile.runtime.memory.host_arena import ALIGN_BYTES, HostFull

from .copies import Block, Blocks, HostSlot


class _Group:
    """A block that several slots share; it goes back with the last of them."""

    def __init__(self, block: Block, slots: int) -> None:
        self.block = block
        self.left = slots

    def give_back(self) -> None:
        self.left -= 1
        if not self.left:
            self.block.free()


class _Part:
    """One slot's share of a block."""

    def __init__(self, group: _Group, start: int, nbytes: int) -> None:
        self.group = group
        # by way of NumPy: a storage of its own, which begins where the part does
        self.tensor = torch.from_numpy(group.block.tensor.numpy()[start : start + nbytes])

    def free(self) -> None:
        """Nothing: the room goes with the tensor on it."""


class ShadowSlot(HostSlot):
    """Host memory that a tensor of the device lies on.

    home: the compute stream that it was made on.
    points: stream → an event behind what was given to that stream for this memory.
    """

    def __init__(self, part: _Part, nbytes: int, pinned: bool, home: Stream) -> None:
        super().__init__(part, nbytes, pinned)
        self.group = part.group
        self.home = home
        self.points: dict[Stream, Event] = {}


class HostAliases:
    """Makes such tensors, and knows them by their addresses. Thread safe.

    used_bytes: what lives. spare_bytes: what is kept for the next ones of the same sizes (gradients
    come again with every step); not more than lives, once what used it has ended.
    """

    def __init__(self, streams: Streams, arena: Blocks) -> None:
        self.streams, self.arena = streams, arena
        self.used_bytes = self.spare_bytes = 0
        self._lock = threading.Lock()
        self._slots: dict[int, ShadowSlot] = {}
        self._spare: dict[int, list[ShadowSlot]] = {}  # by size
        # filled by finalizers, which take no lock
        self._dead: deque[int] = deque()

    def tensors(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Flat uint8 tensors of these sizes, for use on the current compute stream.

        New ones lie one behind the other in one block. What they hold is undefined. `slot_of` knows
        each, and all that shares its storage, for as long as it lives. HostFull: there is no room;
        OffloadError: the memory is not pinned, or cannot be aliased.
        """
        with self._lock:
            self._sweep()
            home = self.streams.compute()
            taken: list[ShadowSlot | None] = [self._take(nbytes, home) for nbytes in sizes]
            missing = [n for n, slot in zip(sizes, taken, strict=True) if slot is None]
            try:
                new = iter(self._new(missing, home) if missing else ())
                return [self._made(slot or next(new)) for slot in taken]
            except BaseException:
                self._keep([slot for slot in taken if slot is not None], [home])
                raise

    def slot_of(self, tensor: torch.Tensor) -> ShadowSlot | None:
        """The slot on whose memory the tensor's storage lies."""
        address = address_of(tensor)
        with self._lock:
            self._sweep()
            return None if address is None else self._slots.get(address)

    def release(self) -> None:
        """Give all that is spare back to the arena; blocks the host until nothing uses it."""
        with self._lock:
            self._sweep()
            self._release_all()

    # -- under the lock ---------------------------------------------------------------------------

    def _take(self, nbytes: int, home: Stream) -> ShadowSlot | None:
        spare = self._spare.get(nbytes)
        if not spare:
            return None
        slot = spare.pop()
        self.spare_bytes -= nbytes
        self._follow(home, slot)
        slot.home = home
        self.streams.taken(slot.block.tensor)
        return slot

    def _follow(self, home: Stream, slot: ShadowSlot) -> None:
        """What is given to `home` from now on runs after all that uses the slot's memory."""
        for event in slot.points.values():
            self.streams.wait(home, event)

    def _new(self, sizes: Sequence[int], home: Stream) -> list[ShadowSlot]:
        starts, end = [], 0
        for nbytes in sizes:
            starts.append(end)
            end += -(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        try:
            block = self.arena.block(end)
        except HostFull:
            if not self.spare_bytes:
                raise
            self._release_all()
            block = self.arena.block(end)
        group = _Group(block, len(sizes))
        return [
            ShadowSlot(_Part(group, start, max(nbytes, 1)), nbytes, self.arena.pinned, home)
            for start, nbytes in zip(starts, sizes, strict=True)
        ]

    def _made(self, slot: ShadowSlot) -> torch.Tensor:
        # of an empty tensor one byte: it has to have an address
        alias = self.streams.alias(slot.block.tensor)
        address = alias.data_ptr()
        when_storage_dies(alias, partial(self._dead.append, address))
        self._slots[address] = slot
        self.used_bytes += slot.nbytes
        return alias[: slot.nbytes]

    def _sweep(self) -> None:
        if self._dead:
            died = []
            while self._dead:
                died.append(self._slots.pop(self._dead.popleft()))
            self.used_bytes -= sum(slot.nbytes for slot in died)
            self._keep(died, [self.streams.compute()])
        if self.spare_bytes > self.used_bytes:
            self._trim()

    def _keep(self, slots: Sequence[ShadowSlot], streams: Sequence[Stream]) -> None:
        """Slots without a tensor: kernels on their home, or on these streams, may use them."""
        events = {stream: self.streams.record(stream) for stream in streams}
        for slot in slots:
            slot.forget()
            if slot.home not in events:
                events[slot.home] = self.streams.record(slot.home)
            slot.points |= events
            self.spare_bytes += slot.nbytes
            self._spare.setdefault(slot.nbytes, []).append(slot)

    def _trim(self) -> None:
        """The largest go first; what is still in use stays until a later time."""
        for size in sorted(self._spare, reverse=True):
            for slot in tuple(self._spare[size]):
                if self.spare_bytes <= self.used_bytes:
                    return
                if all(map(self._is_over, slot.points.values())):
                    self._spare[size].remove(slot)
                    self._give_back(slot)

    def _release_all(self) -> None:
        for slots in self._spare.values():
            while slots:
                self._give_back(slots.pop())

    def _give_back(self, slot: ShadowSlot) -> None:
        for event in slot.points.values():
            self._see_end(event)
        self.spare_bytes -= slot.nbytes
        slot.group.give_back()

    def _is_over(self, event: Event) -> bool:
        try:
            return self.streams.ended(event)
        except RuntimeError:
            return True  # a copy that failed is over as well, and whoever waits for it is told

    def _see_end(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # as above
            self.streams.synchronize(event)
