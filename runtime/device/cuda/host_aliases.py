"""Device tensors in host memory, on blocks of the arena: weights and gradients.

Their memory is reused as in a caching allocator. A freed slot is handed out again at once, and the
compute stream of its new owner waits for all work that may still use it: kernels given to compute
before, and copies of the lanes. The memory returns to the arena, where anybody may get it,
including the host itself, only when the host has seen all of that work end.
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

from .copies import CopyBlock, CopyBlocks, HostSlot


class _Group:
    """A block that several slots share; freed with the last of them."""

    def __init__(self, block: CopyBlock, slots: int) -> None:
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
        # NumPy gives it a separate storage that begins where the part does
        self.tensor = torch.from_numpy(group.block.tensor.numpy()[start : start + nbytes])

    def free(self) -> None:
        """Does nothing: the room is released with the tensor on it."""


class ShadowSlot(HostSlot):
    """Host memory under a device tensor.

    home: the compute stream that it was created on.
    points: stream → an event behind the work that uses this memory on that stream.
    """

    def __init__(self, part: _Part, nbytes: int, pinned: bool, home: Stream) -> None:
        super().__init__(part, nbytes, pinned)
        self.group = part.group
        self.home = home
        self.points: dict[Stream, Event] = {}


class HostAliases:
    """Creates such tensors, and finds them by their addresses. Thread-safe.

    used_bytes: bytes of live tensors. spare_bytes: bytes cached for later tensors of the same sizes
    (gradients recur with every step); at most used_bytes, once pending work on them has ended.
    """

    def __init__(self, streams: Streams, arena: CopyBlocks) -> None:
        self.streams, self.arena = streams, arena
        self.used_bytes = self.spare_bytes = 0
        self._lock = threading.Lock()
        self._slots: dict[int, ShadowSlot] = {}
        self._spare: dict[int, list[ShadowSlot]] = {}  # by size
        # finalizers, which take no lock, append to it
        self._dead: deque[int] = deque()

    def tensors(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Flat uint8 tensors of these sizes, for use on the current compute stream.

        New ones lie one after another in one block. They are uninitialized. `slot_of` finds each,
        and every tensor that shares its storage, for as long as it lives. HostFull: there is no
        room; OffloadError: the memory is not pinned, or cannot be aliased.
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
        """The slot that holds the tensor's storage."""
        with self._lock:
            self._sweep()
        return self.find(tensor)

    def find(self, tensor: torch.Tensor) -> ShadowSlot | None:
        """Like `slot_of`, but gives no stream an order: a capture would keep it for each replay."""
        address = address_of(tensor)
        with self._lock:
            return None if address is None else self._slots.get(address)

    def release(self) -> None:
        """Return all spare memory to the arena; blocks the host until nothing uses it."""
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
        """Make work queued on `home` from now on run after all uses of the slot's memory."""
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
        # at least one byte, also for empty tensors: the alias needs an address
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
        """Make freed slots spare; kernels on their home or on these streams may still use them."""
        events = {stream: self.streams.record(stream) for stream in streams}
        for slot in slots:
            slot.forget()
            if slot.home not in events:
                events[slot.home] = self.streams.record(slot.home)
            slot.points |= events
            self.spare_bytes += slot.nbytes
            self._spare.setdefault(slot.nbytes, []).append(slot)

    def _trim(self) -> None:
        """Release spare slots, largest first; those still in use stay until a later call."""
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
            return True  # a failed copy is over as well; its waiters get the error

    def _see_end(self, event: Event) -> None:
        with contextlib.suppress(RuntimeError):  # see `_is_over`
            self.streams.synchronize(event)
