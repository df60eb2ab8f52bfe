"""Moves tensors between a GPU and the disk: in chunks through pinned staging, or past the host.

A move runs on the thread of its lane. Each lane has a ring of staging of its own (`staging`), whose
steps `disk_steps` makes; `direct_files` bypasses the host where that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from offcompile.runtime.device.cpu import CpuSlot
from offcompile.runtime.device.lane_rates import LaneRates
from offcompile.runtime.device.packing import PackedSlot
from offcompile.runtime.device.streams import Event, Stream, Streams
from offcompile.runtime.disk.gds import CuFile
from offcompile.runtime.disk.spill import SpillStore

from .copies import CopyBlocks, CudaCopy
from .direct_files import DirectFiles
from .disk_steps import packing_steps, rated, raw_steps, unpacking_steps
from .packing import Packers
from .staging import Ring, StagingStep, ring_in

#: lanes between device and disk whose staging is allocated at the start
DISK_LANES = ("device_to_disk", "disk_to_device")


class DiskMoves:
    """The staging of one device, and its way past the host.

    stores: the store of the tier `disk`, or none, if nothing ever moves there. chunk_bytes: the
    size of a ring's chunks. cufile: as in `CudaDevice`.
    """

    def __init__(
        self,
        streams: Streams,
        arena: CopyBlocks,
        stores: Mapping[str, SpillStore],
        packers: Packers,
        rates: LaneRates,
        chunk_bytes: int,
        cufile: Callable[[], CuFile | str],
    ) -> None:
        self._streams, self._arena, self._packers = streams, arena, packers
        self._rates = rates
        self._chunk_bytes = chunk_bytes
        self.rings: dict[str, Ring] = {}
        self.direct: DirectFiles | None = None
        if stores:
            # allocate now, while the host tier has room
            self.rings = {lane: self._new_ring() for lane in DISK_LANES}
            self.direct = DirectFiles(streams, stores["disk"], rates, cufile)

    def ring(self, lane: str) -> Ring:
        """The lane's ring; the first call for another lane than `DISK_LANES` makes it."""
        ring = self.rings.get(lane)
        if ring is None:
            ring = self.rings[lane] = self._new_ring()
        return ring

    def move(
        self,
        copy: CudaCopy,
        slot: CpuSlot | PackedSlot,
        ring: Ring,
        stream: Stream,
        outward: bool,
    ) -> None:
        """Move a whole tensor, behind the work queued on `stream`; returns when the disk is done.

        Events of the copy are behind what the GPU was given so far.
        """
        begin = 0
        if self.direct is not None and isinstance(slot, CpuSlot):
            begin = self.direct.move(copy, slot, stream, outward)
            if begin == slot.nbytes:
                return
        steps = self._steps(copy, slot, ring, outward, begin)
        if isinstance(slot, CpuSlot) and not begin:
            steps = rated(self._rates, copy.lane, slot.nbytes, steps)
        if outward:
            ring.write(stream, steps, partial(_issued, copy))
        else:
            ring.read(stream, steps, copy.part_given)

    def _steps(
        self, copy: CudaCopy, slot: CpuSlot | PackedSlot, ring: Ring, outward: bool, begin: int
    ) -> Iterator[StagingStep]:
        """The steps of a copy whose first `begin` bytes have already moved."""
        if isinstance(slot, CpuSlot):
            return raw_steps(self._streams, slot, copy.part, ring.chunk_bytes, outward, begin)
        packer = self._packers.of(copy.lane, self._packers.in_place and ring.from_arena)
        flat = copy.elements(slot.dtype)
        return (packing_steps if outward else unpacking_steps)(packer, slot, flat)

    def _new_ring(self) -> Ring:
        return ring_in(self._streams, self._arena, self._chunk_bytes)

    def close(self) -> None:
        """Give the staging back, when nothing moves any more."""
        if self.direct is not None:
            self.direct.close()
        for ring in self.rings.values():
            ring.close()
        self.rings.clear()


def _issued(copy: CudaCopy, event: Event | None) -> None:
    copy.event = event
    copy.issued.set()
