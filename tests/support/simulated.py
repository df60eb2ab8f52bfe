"""A device that is asynchronous like a GPU and finds races whether or not they strike.

Compute and every lane are threads with random pauses; memory is ordinary memory. Each job declares
what it reads and writes when it is issued, and carries a vector clock: the set of jobs that are
certain to come before it. The clock knows only orders that the program asked for (`after`, waits,
and compute's own order), not those that happened, nor the order of a lane, which hurrying changes.
Two accesses to the same memory, one of them a write, that no such order connects are a race.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from offcompile.runtime import codecs
from offcompile.runtime.codecs import TensorCodec
from offcompile.runtime.device.failures import not_arrived
from offcompile.runtime.device.interface import Copy, Device, How, Label, Point, Slot, Waited
from offcompile.runtime.device.lane_rates import LaneRates
from offcompile.runtime.device.lanes import LaneJob, Lanes, Needed
from offcompile.runtime.device.tickets import telling

_Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]
COMPUTE = "compute"


@dataclass(eq=False)
class Memory:
    """Bytes that several tensors may hold in turn, and who last touched them.

    `after` is the clock that its next holder starts from: the host saw those jobs end.
    """

    data: _Bytes
    writer: LaneJob | None = None
    readers: list[LaneJob] = field(default_factory=list)
    after: int = 0
    #: on the host, where compute uses it in place
    shadow: bool = False
    slot: SimulatedSlot | None = None


@dataclass(frozen=True)
class Race:
    """`second` touches memory that `first` touches, and nothing puts one after the other."""

    kind: str  # "write then read" | "write then write" | "read then write"
    first: str
    second: str


class SimulatedSlot(Slot):
    """shadow: the memory of an `addressable` tensor, which goes with that.

    packed: what packs on the way in, and the type of what it packs.
    """

    def __init__(
        self,
        nbytes: int,
        tier: str,
        shadow: Memory | None = None,
        packed: tuple[TensorCodec, torch.dtype] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.tier = tier
        self.packed = packed
        worst_bytes = nbytes
        if packed is not None:
            codec, dtype = packed
            worst_bytes = codec.worst_bytes(nbytes // dtype.itemsize, dtype)
        self.memory = shadow or Memory(np.zeros(worst_bytes, np.uint8))
        self._crossed_bytes = nbytes

    @property
    def crossed_bytes(self) -> int:
        return self._crossed_bytes

    def fill(self, source: _Bytes, stored: _Bytes) -> None:
        if self.packed is None:
            stored[:] = source
        else:
            codec, dtype = self.packed
            flat = torch.from_numpy(source).view(dtype)
            self._crossed_bytes = codec.pack(flat, torch.from_numpy(stored))

    def empty_into(self, stored: _Bytes, target: _Bytes) -> None:
        if self.packed is None:
            target[:] = stored
        else:
            codec, dtype = self.packed
            codec.unpack(torch.from_numpy(stored), torch.from_numpy(target).view(dtype))

    @property
    def where(self) -> str:
        return "simulated memory"

    def free(self) -> None:
        # whoever still reads it finds this, not what it wants
        if not self.memory.shadow:
            self.memory.data[:] = 0xDD


class SimulatedDevice(Device):
    """`races` lists what was found; `compute` queues work like a kernel launch does."""

    name = "simulated"

    def __init__(self, seed: int, longest_pause_s: float = 0.0005) -> None:
        dice = random.Random(seed)
        self.lanes = Lanes("simulated", delay_s=lambda: dice.random() * longest_pause_s)
        self.rates = LaneRates()  # of made-up pauses: nothing is counted
        self.races: list[Race] = []
        self._lock = threading.RLock()
        self._clocks: dict[LaneJob, int] = {}
        #: who used its memory before a job: a job that never runs leaves it as it was
        self._before: dict[LaneJob, list[tuple[Memory, LaneJob | None, list[LaneJob]]]] = {}
        self._issued = 0
        self._last_compute: LaneJob | None = None
        self._compute_clock = 0
        self._held: dict[int, Memory] = {}  # by address
        self._spare: list[Memory] = []
        self._died: list[tuple[Memory, int]] = []
        #: jobs that hold a tensor until they end, but for those that compute waits for
        self._holding: set[LaneJob] = set()
        self._ending = threading.local()
        self._host = threading.local()

    @property
    def staging_bytes(self) -> int:
        return 0

    # -- memory --------------------------------------------------------------------------------

    def slot(self, source: torch.Tensor, tier: str, codec: str | None = None) -> SimulatedSlot:
        packed = None if codec is None else (codecs.codec(codec), source.dtype)
        return SimulatedSlot(source.numel() * source.element_size(), tier, packed=packed)

    def allocate(self, slot: Slot, freed: Callable[[], None]) -> torch.Tensor:
        return self.empty(slot.nbytes, freed)

    def addressable(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [self.empty(nbytes, shadow=True) for nbytes in sizes]

    def slot_of(self, tensor: torch.Tensor) -> SimulatedSlot | None:
        memory = self._held.get(tensor.untyped_storage().data_ptr())
        if memory is None or not memory.shadow:
            return None
        if memory.slot is None:
            memory.slot = SimulatedSlot(memory.data.size, "host", memory)
        return memory.slot

    def empty(
        self, nbytes: int, freed: Callable[[], None] | None = None, shadow: bool = False
    ) -> torch.Tensor:
        """Memory for compute: whatever died last is handed out first, at once.

        Kernels that were queued before may still be using it, as with a caching allocator.
        """
        with self._lock:
            self._collect()
            fitting = [m for m in self._spare if m.data.size == nbytes and m.shadow == shadow]
            memory = fitting[-1] if fitting else Memory(np.zeros(nbytes, np.uint8), shadow=shadow)
            if fitting:
                self._spare.remove(memory)
            self._compute_clock |= memory.after
            self._held[memory.data.ctypes.data] = memory
        return telling(memory.data[:], partial(self._gone, memory, freed))

    def _gone(self, memory: Memory, freed: Callable[[], None] | None) -> None:
        # if a copy's end let go of it, the host has seen that copy end
        self._died.append((memory, getattr(self._ending, "clock", 0)))
        if freed is not None:
            freed()

    def _collect(self) -> None:
        while self._died:
            memory, clock = self._died.pop(0)
            memory.after |= clock
            # a copy holds its tensor: when that has died, whoever let go last, the copy has ended
            for job in (memory.writer, *memory.readers):
                if job in self._holding:
                    memory.after |= self._clocks[job]
            memory.slot = None
            self._spare.append(memory)

    def _memory(self, tensor: torch.Tensor) -> Memory:
        """The memory that a tensor of this device starts."""
        return self._held[tensor.data_ptr()]

    # -- compute -------------------------------------------------------------------------------

    def compute(
        self,
        work: Callable[..., None],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        tag: str = "kernel",
    ) -> None:
        """Queue `work(*read arrays, *written arrays)`; the tensors may die before it runs."""
        with self._lock:
            read, written = [self._memory(t) for t in reads], [self._memory(t) for t in writes]
            arrays = [memory.data for memory in (*read, *written)]
            self._issue(COMPUTE, partial(work, *arrays), (), read, written, Label("compute", tag))

    # -- the host --------------------------------------------------------------------------------

    @property
    def known(self) -> int:
        """The clock of all jobs that surely end before what the calling thread does now."""
        clock: int = getattr(self._host, "clock", 0)
        return clock

    @known.setter
    def known(self, clock: int) -> None:
        self._host.clock = clock

    def reached(self, point: Point) -> None:
        assert isinstance(point, LaneJob)
        self.lanes.wait(point)
        with self._lock:
            self.known |= self._clocks[point]
        if point.error is not None:
            raise not_arrived(point.label, point.error)

    def touch(
        self,
        work: Callable[..., None],
        reads: Sequence[torch.Tensor] = (),
        writes: Sequence[torch.Tensor] = (),
        tag: str = "host",
    ) -> None:
        """`work(*read arrays, *written arrays)` by the calling thread itself, now."""
        with self._lock:
            read, written = [self._memory(t) for t in reads], [self._memory(t) for t in writes]
            arrays = [memory.data for memory in (*read, *written)]
            lane = f"host {threading.get_ident()}"
            job = self._issue(lane, partial(work, *arrays), (), read, written, Label("host", tag))
        self.reached(job)

    # -- orders ----------------------------------------------------------------------------------

    def mark(self) -> Point | None:
        return self._last_compute

    def wait(self, copy: Copy) -> Waited:
        """Queue a wait on the compute lane; hurries the copy as a blocking wait would."""
        assert isinstance(copy, LaneJob)
        how = How.READY if copy.ended else How.LATE
        if self.lanes.hurry(copy):
            how = How.PROMOTED
        with self._lock:
            self._issue(COMPUTE, _nothing, (copy,), (), (), Label("compute", "wait"))
        # ordered by the wait, its memory may go round again before the copy ends
        copy.keep = None
        self._holding.discard(copy)
        return Waited(how, 0)

    # -- copies --------------------------------------------------------------------------------

    def _copy(
        self,
        lane: str,
        tensor: torch.Tensor,
        slot: Slot,
        after: Sequence[Point],
        label: Label,
        on_end: Callable[[Copy], None],
        outward: bool,
    ) -> Copy:
        assert isinstance(slot, SimulatedSlot)
        with self._lock:
            device, host = self._memory(tensor), slot.memory
            if outward:
                work = partial(slot.fill, device.data, host.data)
                return self._issue(
                    lane, work, after, (device,), (host,), label, on_end, keep=tensor
                )
            work = partial(slot.empty_into, host.data, device.data)
            return self._issue(lane, work, after, (host,), (device,), label, on_end, keep=tensor)

    def cancel(self, copy: Copy) -> bool:
        assert isinstance(copy, LaneJob)
        # in one: what the copy held may go round as soon as it has let go
        with self._lock:
            if not self.lanes.cancel(copy):
                return False
            for memory, writer, readers in self._before.pop(copy):
                memory.readers = [job for job in memory.readers if job is not copy]
                if memory.writer is copy:
                    memory.writer, memory.readers = writer, [*readers, *memory.readers]
        return True

    def before_copies(self, hook: Callable[[], None]) -> None:
        self.lanes.before = hook

    def drain(self) -> None:
        """Also raises the first error of compute, which nothing else would tell of."""
        self.lanes.drain()
        failed = self._last_compute.error if self._last_compute is not None else None
        while isinstance(failed, Needed) and failed.__cause__ is not None:
            failed = failed.__cause__
        if failed is not None:
            raise failed

    def close(self) -> None:
        self.lanes.close()

    # -- the detector --------------------------------------------------------------------------

    def _issue(
        self,
        lane: str,
        work: Callable[[], None],
        after: Sequence[Point],
        reads: Sequence[Memory],
        writes: Sequence[Memory],
        label: Label,
        on_end: Callable[[Copy], None] | None = None,
        keep: object = None,
    ) -> LaneJob:
        needs = [point for point in after if isinstance(point, LaneJob)]
        computing = lane == COMPUTE
        if computing and self._last_compute is not None:
            needs.append(self._last_compute)
        clock = self.known | (self._compute_clock if computing else 0)
        for need in needs:
            clock |= self._clocks[need]
        for memory in (*reads, *writes):
            clock |= memory.after
        self._issued += 1
        clock |= 1 << self._issued
        # the job's memory may only die where its thread says that it has ended
        job = self.lanes.submit(
            lane,
            partial(self._work, work, clock),
            needs,
            label,
            on_end,
            keep,
            strict=computing,
        )
        self._clocks[job] = clock
        if keep is not None:
            self._holding.add(job)
        self._before[job] = [
            (memory, memory.writer, memory.readers) for memory in (*reads, *writes)
        ]
        if computing:
            self._last_compute, self._compute_clock = job, clock
        for memory in reads:
            self._check(memory.writer, job, clock, "write then read")
            memory.readers.append(job)
        for memory in writes:
            self._check(memory.writer, job, clock, "write then write")
            for reader in memory.readers:
                self._check(reader, job, clock, "read then write")
            memory.writer, memory.readers = job, []
        return job

    def _work(self, work: Callable[[], None], clock: int) -> None:
        self._ending.clock = clock
        work()

    def _check(self, first: LaneJob | None, second: LaneJob, clock: int, kind: str) -> None:
        # a job is in a clock if its own, latest, bit is
        if first is not None and not clock >> (self._clocks[first].bit_length() - 1) & 1:
            self.races.append(Race(kind, _name(first), _name(second)))


def _nothing() -> None:
    """Do nothing: a wait has done its work once it is reached."""


def _name(job: LaneJob) -> str:
    return f"{job.label.direction} {job.label.tag}"
