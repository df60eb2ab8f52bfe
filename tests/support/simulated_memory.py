"""Memory of simulated streams: who touched it, in what order, and who gets it next.

A clock is the set of accesses that are certain to come before. Two accesses to the same memory,
one of them a write, neither in the other's clock, are a race, whether or not it struck. Memory
that goes round brings along what those who dropped it knew.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from simulated import Race

from offcompile.runtime.device.streams import MemoryUse
from offcompile.runtime.device.tickets import telling
from offcompile.runtime.memory.host_arena import HostFull

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
_PAGE_BYTES = 4096


@dataclass(frozen=True)
class _Access:
    bit: int
    what: str


@dataclass(eq=False)
class Memory:
    """Bytes that several tensors may hold in turn, who touched them, and what the next may know.

    pool: what they go back to, an arena or a compute stream; None: they are from elsewhere.
    """

    data: _Bytes
    pool: object = None
    writer: _Access | None = None
    readers: list[_Access] = field(default_factory=list)
    after: int = 0


class Watch:
    """All memory, and the clock of each thread. Its owner holds the lock around every call."""

    def __init__(self) -> None:
        self.races: list[Race] = []
        self._accesses = 0
        self._thread = threading.local()
        self._held: dict[int, Memory] = {}
        self._spare: list[Memory] = []
        self._died: deque[tuple[Memory, int]] = deque()
        self._live_bytes = self._peak_bytes = self._total_bytes = 0

    @property
    def known(self) -> int:
        """The clock of the calling thread."""
        clock: int = getattr(self._thread, "clock", 0)
        return clock

    @known.setter
    def known(self, clock: int) -> None:
        self._thread.clock = clock

    # -- going round -----------------------------------------------------------------------------

    def device_tensor(self, nbytes: int, pool: object) -> torch.Tensor:
        """Flat memory that goes back to `pool` when its storage dies."""
        created = len(self._held)
        memory = self.take(nbytes, pool)
        self._total_bytes += nbytes * (len(self._held) > created)
        self._live_bytes += nbytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)
        return telling(memory.data[:], partial(self._gone, memory))

    def _gone(self, memory: Memory) -> None:
        # a finalizer: on whatever thread, the lock taken or not
        self._died.append((memory, self.known))

    def take(self, nbytes: int, pool: object) -> Memory:
        """The memory of this size that died last in the same pool, or else fresh memory."""
        self._collect()
        fitting = [m for m in self._spare if m.pool is pool and m.data.size == nbytes]
        if fitting:
            memory = fitting[-1]
            self._spare.remove(memory)
        else:
            room = np.zeros(nbytes + _PAGE_BYTES, np.uint8)
            start = -room.ctypes.data % _PAGE_BYTES
            memory = Memory(room[start : start + nbytes], pool)
            self._held[memory.data.ctypes.data] = memory
        self.known |= memory.after
        return memory

    def give(self, memory: Memory) -> None:
        self._join(memory)
        memory.after |= self.known
        # whoever still reads it finds this, not what it wants
        memory.data[:] = 0xDD
        self._spare.append(memory)

    def _join(self, memory: Memory) -> None:
        """Take over the accesses to parts that had addresses of their own, and drop the parts."""
        start = memory.data.ctypes.data
        for address in [a for a in self._held if start < a < start + memory.data.size]:
            part = self._held.pop(address)
            memory.readers += [*part.readers, *([part.writer] if part.writer else ())]
            memory.after |= part.after

    def let_go(self, tensor: torch.Tensor) -> None:
        """Add to the memory's clock what the calling thread knows, whoever drops it last."""
        self.of(tensor).after |= self.known

    def taken(self, tensor: torch.Tensor) -> None:
        """Teach the calling thread what those knew who let go of the memory."""
        self.known |= self.of(tensor).after

    def _collect(self) -> None:
        while self._died:
            memory, clock = self._died.popleft()
            memory.after |= clock
            self._spare.append(memory)
            self._live_bytes -= memory.data.size

    def use(self) -> MemoryUse:
        self._collect()
        total = self._total_bytes
        return MemoryUse(self._live_bytes, self._peak_bytes, total)

    def reset_peak(self) -> None:
        self._collect()
        self._peak_bytes = self._live_bytes

    # -- accesses --------------------------------------------------------------------------------

    def of(self, tensor: torch.Tensor) -> Memory:
        """The memory of the storage; memory from elsewhere is kept, so that nobody else gets it."""
        start = tensor.untyped_storage().data_ptr()
        memory = self._held.get(start)
        if memory is None:
            whole = torch.empty(0, dtype=torch.uint8, device="cpu")
            memory = Memory(whole.set_(tensor.untyped_storage()).numpy())
            self._held[start] = memory
        return memory

    def part(self, tensor: torch.Tensor) -> _Bytes:
        """The bytes of a flat tensor, whoever holds them by the time they are used."""
        data = self.of(tensor).data
        start = tensor.data_ptr() - data.ctypes.data
        return data[start : start + tensor.numel() * tensor.element_size()]

    def access(
        self,
        what: str,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
        clock: int,
    ) -> int:
        """Check an access that `clock` comes before; returns the clock behind it."""
        access = _Access(self._accesses, what)
        self._accesses += 1
        clock |= 1 << access.bit
        for memory in map(self.of, reads):
            self._check(memory.writer, access, clock, "write then read")
            memory.readers.append(access)
        for memory in map(self.of, writes):
            self._check(memory.writer, access, clock, "write then write")
            for reader in memory.readers:
                self._check(reader, access, clock, "read then write")
            memory.writer, memory.readers = access, []
        return clock

    def _check(self, first: _Access | None, second: _Access, clock: int, kind: str) -> None:
        if first is not None and not clock >> first.bit & 1:
            self.races.append(Race(kind, first.what, second.what))


class SimulatedBlock:
    def __init__(self, arena: SimulatedArena, memory: Memory) -> None:
        self.nbytes = memory.data.size
        self.tensor = torch.from_numpy(memory.data)
        self._arena = arena
        self._memory: Memory | None = memory

    def free(self) -> None:
        memory, self._memory = self._memory, None
        if memory is not None:
            self._arena.take_back(memory)


class SimulatedArena:
    """Stands in for `host_arena.HostArena`; freed blocks go round at once, overwritten."""

    def __init__(
        self, watch: Watch, lock: threading.Condition, limit_bytes: int, pinned: bool
    ) -> None:
        self.pinned = pinned
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._watch = watch
        self._lock = lock

    def block(self, nbytes: int, align_bytes: int = 256) -> SimulatedBlock:
        with self._lock:
            if self.used_bytes + nbytes > self.limit_bytes:
                raise HostFull(
                    f"{nbytes} bytes do not fit: {self.used_bytes} of {self.limit_bytes} are used."
                )
            self.used_bytes += nbytes
            return SimulatedBlock(self, self._watch.take(nbytes, self))

    def take_back(self, memory: Memory) -> None:
        with self._lock:
            self.used_bytes -= memory.data.size
            self._watch.give(memory)
