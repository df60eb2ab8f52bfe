"""Turns the copies of a thread into nodes of a graph while the thread captures (`graphs`).

A copy forks its lane's stream from compute by the mark that it starts after, and joins it by the
wait for the copy, or at the end. The host sees no copy of a graph end: nobody asks for its event,
and its host memory belongs to the graph, which writes and reads it at every replay.

A weight on the host owns its memory, and graphs read it there: whoever replays one makes sure that
the weight has not moved. A gradient that leaves goes to memory that was allocated before the
capture (`HostRoom`), since memory that others have used comes with events outside of it. The graph
holds that memory, so that nobody else gets it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from offcompile.runtime.base.define import inside
from offcompile.runtime.base.threads import bare
from offcompile.runtime.device.graphs import CannotCapture, StreamGraph
from offcompile.runtime.device.interface import How, Point, Slot, Waited
from offcompile.runtime.device.streams import Event, Stream, Streams

from .copies import CudaCopy, HostSlot, Mark
from .host_aliases import ShadowSlot
from .packing import PackedHostSlot


@dataclass(frozen=True, eq=False)
class HostRoom:
    """Host memory of a graph that kernels use in place: flat uint8, and its slot."""

    flat: torch.Tensor
    slot: ShadowSlot


@dataclass(eq=False)
class Capture:
    """The copies of one graph, in their order."""

    streams: Streams
    #: host memory that nothing in the graph has asked for yet
    rooms: list[HostRoom] = field(default_factory=list)
    #: and that it writes at each replay
    written: list[HostRoom] = field(default_factory=list)
    copies: list[CudaCopy] = field(default_factory=list)
    #: bytes of the copies out, and of the loads
    out_bytes: int = 0
    in_bytes: int = 0
    _slots: list[HostSlot] = field(default_factory=list)

    # --- while it captures --------------------------------------------------------------------

    def copy(self, copy: CudaCopy, slot: Slot, after: Sequence[Point], outward: bool) -> None:
        """Put a copy into the graph."""
        if not isinstance(slot, HostSlot):
            raise CannotCapture(
                f"{copy.label.tag} moves to {slot.where}, where the processor takes part in each"
                " copy; give host_memory enough room that nothing goes to the disk"
            )
        if isinstance(slot, PackedHostSlot):
            raise CannotCapture(
                f"{copy.label.tag} is packed by a codec, whose sizes the host looks at in each"
                " step; choose a policy without codecs"
            )
        if not slot.pinned:
            raise CannotCapture(
                f"{copy.label.tag} moves to host memory that could not be pinned, and copies of"
                " such memory make the host wait; raise the limit (`ulimit -l`)"
            )
        stream = self.streams.stream(copy.lane)
        for event in self._events(after):
            self.streams.wait(stream, event)
        if slot.nbytes:
            device, host = copy.part(0, slot.nbytes), slot.block.tensor
            target, source = (host, device) if outward else (device, host)
            self.streams.copy(stream, target, source)
        copy.event = self.streams.record(stream)
        if not isinstance(slot, ShadowSlot):
            slot.hold()
            self._slots.append(slot)
        self.copies.append(copy)
        if outward:
            self.out_bytes += slot.nbytes
        else:
            self.in_bytes += slot.nbytes

    def addressable(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Host memory that kernels can use in place, of what there was before the capture."""
        return [self._room(nbytes) for nbytes in sizes]

    def _room(self, nbytes: int) -> torch.Tensor:
        for room in self.rooms:
            if room.flat.numel() == nbytes:
                self.rooms.remove(room)
                self.written.append(room)
                return room.flat
        raise CannotCapture(
            f"a gradient of {nbytes} bytes leaves that the plan does not list; raise memory until"
            " gradients stay on the device"
        )

    def _events(self, after: Sequence[Point]) -> Iterator[Event]:
        for point in after:
            # copies of the forward's graph have joined it at its end, and others have ended
            if isinstance(point, Mark) or (isinstance(point, CudaCopy) and point in self.copies):
                yield point.event

    def wait(self, copy: CudaCopy) -> Waited:
        """Let compute wait for a copy, and release its tensor to compute's allocator."""
        if copy in self.copies:
            self.join(copy)
        copy.awaited, copy.keep = True, None
        return Waited(How.READY, 0)

    def join(self, copy: CudaCopy) -> None:
        self.streams.wait(self.streams.compute(), copy.event)

    # --- then -----------------------------------------------------------------------------------

    def end(self) -> None:
        """Let compute wait for all lanes: a graph must not end on a stream of its own."""
        last = {copy.lane: copy for copy in self.copies}
        for copy in last.values():
            self.join(copy)

    def settle(self) -> None:
        """Tell those who wait for the ends of copies that there is none to see."""
        for copy in self.copies:
            on_end, copy.on_end = copy.on_end, None
            # its end is in no stream's way any more: a replay ends on compute
            copy.keep, copy.needs, copy.event, copy.over = None, (), None, True
            if on_end is not None:
                on_end(copy)
        self.rooms.clear()

    def fail(self, error: BaseException) -> None:
        for copy in self.copies:
            copy.error = copy.error or bare(error)
        self.settle()
        self.release()

    def given_to(self, compute: Stream) -> None:
        """Note the stream that the graph was given to: it uses its host memory there."""
        for room in self.written:
            room.slot.home = compute

    @property
    def held(self) -> set[HostSlot]:
        """The host memory that the graph holds."""
        return {*self._slots, *(room.slot for room in self.written)}

    def release(self) -> None:
        """Give the host memory of the graph back."""
        self.written.clear()
        slots, self._slots = self._slots, []
        for slot in slots:
            slot.let_go()


@contextmanager
def capturing(
    streams: Streams, graph: StreamGraph, rooms: Sequence[HostRoom] = ()
) -> Iterator[Capture]:
    """Inside, the calling thread's copies on these streams go into the graph. `rooms`: the host
    memory for its results."""
    made = Capture(streams, list(rooms))
    try:
        with graph.capturing(), inside(Capture, made):
            yield made
            made.end()
    except BaseException as error:
        made.fail(error)
        raise
    made.settle()
