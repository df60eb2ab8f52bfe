"""A GPU as a device: streams for lanes, pinned host memory as the near tier, disks behind it.

A copy to or from the host tier is queued at once on its lane's stream, and nothing blocks the host:
events order the streams, and a thread for each lane waits for copies to end. Between device and
disk, a thread for each lane moves the data (`disk_moves`); there, a wait blocks the host until the
last copy on the GPU's side has been queued, and no longer.

Nothing uses `record_stream`, which would delay the reuse of memory until the host happens to look:
a copy holds its tensor until compute has been made to wait for it, on the stream it was issued
from, or until the host has seen it end. In the first case only compute reuses the memory, behind
the wait.

Errors of a copy are stored in `copy.error` and raised by its waiters. A load can fail after compute
has passed its wait; the next wait on this device, or `drain`, raises that error.

Where host memory is not pinned (`arena.pinned` is False) CUDA copies through staging of its own: a
copy out returns when it has ended, so the host waits for compute there and little overlaps; a copy
in returns when its source was read. Everything else is the same and stays correct, since no code
here takes the return of a copy for its end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.counters import now_ns
from offcompile.runtime.base.define import current
from offcompile.runtime.base.threads import bare
from offcompile.runtime.device.cpu import PAGE_BYTES, CpuSlot
from offcompile.runtime.device.failures import no_room
from offcompile.runtime.device.interface import Copy, Device, How, Label, Point, Slot, Waited
from offcompile.runtime.device.lane_rates import LaneRates
from offcompile.runtime.device.lanes import Lanes
from offcompile.runtime.device.move_events import HeardCopy
from offcompile.runtime.device.packing import PackedSlot
from offcompile.runtime.device.streams import Event, Stream, Streams, when_storage_dies
from offcompile.runtime.disk.gds import CuFile, this_cufile
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.host_arena import HostFull

from .capture import Capture
from .copies import (
    CopyBlocks,
    CudaCopy,
    HostSlot,
    Mark,
    check_needs,
    first_error,
    home_of,
    note_end,
    reach,
)
from .disk_moves import DiskMoves
from .host_aliases import HostAliases, ShadowSlot
from .in_flight import CopiesInFlight
from .packing import PackedHostSlot, Packers
from .slots import SlotMaker
from .staging import CHUNKS

#: copies of the host tier of at least this size are timed by the GPU, to measure the lane's rate
RATED_BYTES = 1 << 20


class CudaDevice(Device):
    """Implements `Device` on a CUDA GPU.

    stores: the store of the tier `disk`, or none; a full host tier overflows to it.
    staging_bytes: pinned staging of each lane between device and disk.
    timed: time copies of the host tier with the GPU's clock (for recordings).
    cufile: called at the first move to or from the disk, for a path that bypasses the host.
    """

    name = "cuda"

    def __init__(
        self,
        streams: Streams,
        arena: CopyBlocks,
        stores: Mapping[str, SpillStore],
        staging_bytes: int = 16 << 20,
        timed: bool = False,
        cufile: Callable[[], CuFile | str] = this_cufile,
    ) -> None:
        if staging_bytes < CHUNKS * PAGE_BYTES:
            raise OffloadError(
                f"staging_bytes is {staging_bytes}: it must be at least {CHUNKS * PAGE_BYTES}."
            )
        if set(stores) - {"disk"}:
            raise OffloadError(
                f"A CUDA device has files on the tier `disk` only, not on {', '.join(stores)}."
            )
        self.streams = streams
        self.arena = arena
        self.shadows = HostAliases(streams, arena)
        self.packers = Packers(streams, arena.pinned)
        self.stores = dict(stores)
        self.timed = timed
        self._lanes = Lanes("cuda")
        self.rates = LaneRates()
        self._before: Callable[[], None] | None = None
        self._issuing: dict[str, threading.Lock] = {}
        self._in_flight = CopiesInFlight()
        chunk_bytes = staging_bytes // CHUNKS // PAGE_BYTES * PAGE_BYTES
        self._slots = SlotMaker(arena, self.stores, self.packers, self.shadows, chunk_bytes)
        self._disk = DiskMoves(
            streams, arena, self.stores, self.packers, self.rates, chunk_bytes, cufile
        )

    @property
    def captures(self) -> bool:
        return current(Capture) is not None

    @property
    def staging_bytes(self) -> int:
        """Device memory allocated for packing; other staging is on the host."""
        return self.packers.nbytes + self.streams.packing_bytes

    # -- memory --------------------------------------------------------------------------------

    def slot(
        self, source: torch.Tensor, tier: str, codec: str | None = None
    ) -> HostSlot | CpuSlot | PackedSlot:
        return self._slots.make(source, tier, codec)

    def addressable(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        if (capture := current(Capture)) is not None:
            return capture.addressable(sizes)
        try:
            return self.shadows.tensors(sizes)
        except HostFull:
            # copies that are over soon hold some of it
            self._in_flight.drain()
            if self._before is not None:
                self._before()
            return self.shadows.tensors(sizes)

    def slot_of(self, tensor: torch.Tensor) -> Slot | None:
        return self.shadows.find(tensor) if self.captures else self.shadows.slot_of(tensor)

    def allocate(self, slot: Slot, freed: Callable[[], None]) -> torch.Tensor:
        try:
            buffer = self.streams.empty(slot.nbytes)
        except torch.OutOfMemoryError as error:
            raise no_room(self.streams.name, slot, error) from error
        when_storage_dies(buffer, freed)
        return buffer

    # -- access by the host ------------------------------------------------------------------------

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        slot = self._slot(tensor)
        assert isinstance(slot, ShadowSlot)
        # the arena's memory, at the same address that the device uses
        host = slot.block.tensor[: slot.nbytes].view(tensor.dtype)
        return host.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    def reached(self, point: Point) -> None:
        reach(self.streams, point)

    def _users(self, slot: Slot) -> Sequence[Point | None]:
        assert isinstance(slot, ShadowSlot)
        # lanes may still read for a load that nobody waited for; only that load reports its failure
        loads = tuple(slot.points.values())
        return [*super()._users(slot), *(Mark(event, quiet=True) for event in loads)]

    # -- orders ----------------------------------------------------------------------------------

    def mark(self) -> Mark:
        compute = self.streams.compute()
        return Mark(self.streams.record(compute), compute)

    def wait(self, copy: Copy) -> Waited:
        assert isinstance(copy, CudaCopy)
        if (capture := current(Capture)) is not None:
            return capture.wait(copy)
        self._in_flight.raise_late()
        began_ns = now_ns()
        how = How.READY
        if not copy.issued.is_set():
            hurried = copy.job is not None and self._lanes.hurry(copy.job)
            how = How.PROMOTED if hurried else How.LATE
            copy.await_issued()
        compute = self.streams.compute()
        try:
            if copy.event is not None:
                if how is How.READY and not self.streams.ended(copy.event):
                    how = How.LATE
                self._let_compute_wait(compute, copy.event)
        except Exception as error:
            copy.error = copy.error or bare(error)
        self._in_flight.passed(copy)
        if compute == copy.home and copy.awaited:
            # the memory returns to the allocator of that stream, which now runs behind the copy
            copy.keep = None
        return Waited(how, now_ns() - began_ns)

    def _let_compute_wait(self, compute: Stream, event: Event) -> None:
        self.streams.wait(compute, event)

    def _order(self, stream: Stream, after: Sequence[Point]) -> None:
        """Make work queued on `stream` from now on run after these points."""
        for point in after:
            if isinstance(point, CudaCopy):
                point.await_issued()
            elif not isinstance(point, Mark):
                raise OffloadError(f"A {type(point).__name__} is no point on {self.streams.name}.")
            if point.event is not None:
                self.streams.wait(stream, point.event)

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
        needs = tuple(point for point in after if isinstance(point, CudaCopy))
        copy = CudaCopy(lane, label, slot, tensor, home_of(after, self.streams), needs, on_end)
        if (capture := current(Capture)) is not None:
            capture.copy(copy, slot, after, outward)
            return copy
        self._in_flight.add(copy)
        aside = isinstance(slot, PackedHostSlot) and not self.packers.in_place
        if isinstance(slot, HostSlot) and not aside:
            self._by_stream(copy, slot, after, outward)
        else:
            assert isinstance(slot, CpuSlot | PackedSlot | PackedHostSlot)
            self._by_thread(copy, slot, after, outward)
        return copy

    def _by_stream(
        self, copy: CudaCopy, slot: HostSlot, after: Sequence[Point], outward: bool
    ) -> None:
        stream = self.streams.stream(copy.lane)
        lock = self._issuing.setdefault(copy.lane, threading.Lock())
        # the ends of copies are awaited in stream order
        with lock:
            try:
                check_needs(copy)
                self._order(stream, after)
                heard = copy.label.heard
                timed = self.timed or heard is not None or slot.nbytes >= RATED_BYTES
                if timed:
                    copy.began = self.streams.record(stream, timing=True)
                if isinstance(slot, PackedHostSlot):
                    self._through(copy, slot, stream, outward)
                elif slot.nbytes:
                    device, host = copy.part(0, slot.nbytes), slot.block.tensor
                    target, source = (host, device) if outward else (device, host)
                    self.streams.copy(stream, target, source)
                copy.event = self.streams.record(stream, timing=timed)
                if isinstance(slot, ShadowSlot):
                    slot.points[stream] = copy.event
                if heard is not None:
                    began, ended = copy.began, copy.event
                    heard.copies.append(HeardCopy(copy.label.tag, copy.lane, began, ended))
            except Exception as error:
                copy.error = bare(error)
            self._ending(copy)

    def _through(self, copy: CudaCopy, slot: PackedHostSlot, stream: Stream, outward: bool) -> None:
        packer = self.packers.of(copy.lane, self.packers.in_place)
        flat = copy.elements(slot.rooms.dtype)
        (slot.pack if outward else slot.unpack)(packer, stream, flat)

    def _ending(self, copy: CudaCopy) -> None:
        """Note that the whole copy was given to the GPU, or never will be."""
        copy.issued.set()
        self._in_flight.at_end(copy, partial(self._complete, copy))

    def _by_thread(
        self,
        copy: CudaCopy,
        slot: CpuSlot | PackedSlot | PackedHostSlot,
        after: Sequence[Point],
        outward: bool,
    ) -> None:
        work = partial(self._move, copy, slot, tuple(after), outward)
        over = partial(self._job_over, copy, outward)
        needs = [need.job for need in copy.needs if need.job is not None]
        copy.issued = threading.Event()
        try:
            # the listener's clock is the GPU's, not the host's
            label = replace(copy.label, heard=None)
            copy.job = self._lanes.submit(copy.lane, work, needs, label, over)
        except BaseException:
            self._in_flight.discard(copy)
            raise

    # -- on a lane's thread ----------------------------------------------------------------------

    def _move(
        self,
        copy: CudaCopy,
        slot: CpuSlot | PackedSlot | PackedHostSlot,
        after: Sequence[Point],
        outward: bool,
    ) -> None:
        check_needs(copy)
        stream = self.streams.stream(copy.lane)
        if isinstance(slot, PackedHostSlot):
            self._order(stream, after)
            try:
                self._through(copy, slot, stream, outward)
            finally:  # even after an error, queued work must be waited for
                copy.event = self.streams.record(stream)
            return
        ring = self._disk.ring(copy.lane)
        self._order(stream, after)
        self._disk.move(copy, slot, ring, stream, outward)

    def _job_over(self, copy: CudaCopy, outward: bool, job: Copy) -> None:
        copy.error = job.error
        if outward and not isinstance(copy.slot, HostSlot):
            copy.issued.set()
            self._finish(copy)
        else:
            # the last copies to the GPU still run while this thread reads the next tensor
            self._ending(copy)

    # -- ends of copies --------------------------------------------------------------------------

    def _complete(self, copy: CudaCopy) -> None:
        """Wait for the copy to end; runs on the thread of its lane's ends."""
        if copy.event is not None:
            self.streams.doze(copy.event, self._in_flight.hurry)
        if self._before is not None:
            self._before()
        error = first_error(self.streams, copy)
        if error is not None:
            self._in_flight.failed(copy, error)
        if isinstance(copy.slot, PackedHostSlot) and copy.error is None:
            copy.slot.look()  # a load may be seen to end before its copy out is
        if isinstance(copy.slot, HostSlot) and copy.job is None:
            busy_ns = note_end(self.streams, copy)
            if busy_ns is not None and not isinstance(copy.slot, PackedHostSlot):
                self.rates.add(copy.lane, copy.slot.nbytes, busy_ns)
        self._finish(copy)

    def _finish(self, copy: CudaCopy) -> None:
        slot, on_end, copy.on_end = copy.slot, copy.on_end, None
        keep, copy.keep = copy.keep, None
        if keep is not None:
            self.streams.let_go(keep)
            keep = None  # dropped before `on_end` is told
        if isinstance(slot, HostSlot):
            self.streams.let_go(slot.block.tensor)
        copy.needs = ()
        if on_end is not None:
            on_end(copy)
            # dropped before a waiting `drain` returns, with the references it holds
            on_end = None
        self._in_flight.over(copy)

    # -- the rest --------------------------------------------------------------------------------

    def cancel(self, copy: Copy) -> bool:
        """Cancel a copy between device and disk; all others were already given to the GPU."""
        assert isinstance(copy, CudaCopy)
        if copy.job is None or not self._lanes.cancel(copy.job):
            return False
        self._cancelled(copy)
        return True

    def _cancelled(self, copy: CudaCopy) -> None:
        assert copy.job is not None
        copy.error = copy.job.error
        copy.on_end = None
        copy.issued.set()
        self._finish(copy)

    def before_copies(self, hook: Callable[[], None]) -> None:
        """Call `hook` also before waiting for a copy's end, because callers start stream copies."""
        self._before = self._lanes.before = hook

    def drain(self) -> None:
        """Like the base method; also raises the error of a load that compute has already passed."""
        self._in_flight.drain()
        self._in_flight.raise_late()

    def close(self) -> None:
        self._in_flight.refuse()
        self._lanes.close()
        for copy in self._in_flight.queued():
            self._cancelled(copy)
        self._in_flight.join()
        self._disk.close()
        self.packers.close()
        self._in_flight.warn_late()
