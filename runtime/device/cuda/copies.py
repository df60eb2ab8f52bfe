"""The CUDA device's types: points in compute, slots in host memory, copies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Protocol

import torch

from offcompile.runtime.base import watchdog
from offcompile.runtime.base.counters import note, now_ns
from offcompile.runtime.base.threads import bare
from offcompile.runtime.device.failures import not_arrived
from offcompile.runtime.device.interface import Copy, Label, Point, Slot
from offcompile.runtime.device.lanes import LaneJob, Needed
from offcompile.runtime.device.streams import Event, Stream, Streams, flat_bytes, flat_elements


class CopyBlock(Protocol):
    """The interface of a block of host memory (`blocks.MemoryBlock`) that the device needs."""

    @property
    def tensor(self) -> torch.Tensor: ...

    def free(self) -> None: ...


class CopyBlocks(Protocol):
    """The interface of `host_arena.HostArena` that the device needs."""

    @property
    def pinned(self) -> bool: ...

    def block(self, nbytes: int, align_bytes: int = 256) -> CopyBlock: ...


class Mark(Point):
    """A point in compute, on `stream`, or one behind other work whose failure others report
    (`quiet`)."""

    def __init__(self, event: Event, stream: Stream = None, quiet: bool = False) -> None:
        self.event = event
        self.stream = stream
        self.quiet = quiet


class HostSlot(Slot):
    """A block of host memory."""

    tier = "host"

    def __init__(self, block: CopyBlock, nbytes: int, pinned: bool) -> None:
        self.nbytes = nbytes
        self.block = block
        self.pinned = pinned
        self._graphs = 0
        self._is_free = False

    @property
    def where(self) -> str:
        return "pinned host memory" if self.pinned else "host memory"

    def free(self) -> None:
        self._is_free = True
        if not self._graphs:
            self.block.free()

    def hold(self) -> None:
        """Keep the block for a graph that copies to it, or from it, at every replay."""
        self._graphs += 1

    def let_go(self) -> None:
        """Undo one `hold`."""
        self._graphs -= 1
        if self._is_free and not self._graphs:
            self.block.free()


#: `issued` of copies that the calling thread gives to the GPU; others have one of their own
AT_ONCE = threading.Event()
AT_ONCE.set()


class CudaCopy(Copy):
    """A copy; `keep` is its tensor on the device, `home` the compute stream it was issued from.

    event: behind the work of the copy that the GPU was given so far; all of it once `issued` is
    set.
    parts: events behind single parts of a load, each of which may report a failure.
    """

    def __init__(
        self,
        lane: str,
        label: Label,
        slot: Slot,
        keep: torch.Tensor,
        home: Stream,
        needs: tuple[CudaCopy, ...],
        on_end: Callable[[Copy], None],
    ) -> None:
        self.lane = lane
        self.label = label
        self.slot = slot
        self.keep: torch.Tensor | None = keep
        self.home = home
        self.needs = needs
        self.on_end: Callable[[Copy], None] | None = on_end
        self.event: Event | None = None
        self.parts: list[Event] = []
        self.began: Event | None = None
        self.began_ns = now_ns()
        self.issued = AT_ONCE
        self.job: LaneJob | None = None
        self.awaited = False
        self.over = False

    @property
    def ended(self) -> bool:
        return self.over

    def part_given(self, event: Event | None) -> None:
        if event is not None:
            self.parts.append(event)
        self.event = event

    def synchronize(self, streams: Streams) -> None:
        """Block until the GPU has passed all work of the copy; raises its errors."""
        for event in self.parts or [self.event]:
            if event is not None:
                streams.synchronize(event)

    def await_issued(self) -> None:
        """Block until the whole copy was given to the GPU: at once, unless a disk takes part."""
        if not self.issued.is_set():
            watchdog.until_set(self.issued, self._described)

    def _described(self) -> str:
        way = "copy out" if self.label.direction == "out" else "load"
        size = f"{self.slot.nbytes} bytes, {self.slot.where}"
        return f"The {way} of {self.label.tag} ({size}) on lane {self.lane}"

    def part(self, start: int, size: int) -> torch.Tensor:
        assert self.keep is not None
        flat = flat_bytes(self.keep)
        return flat if size == flat.numel() else flat[start : start + size]

    def elements(self, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor, flat, as elements of `dtype`."""
        assert self.keep is not None
        return flat_elements(self.keep, dtype)


def home_of(after: Sequence[Point], streams: Streams) -> Stream:
    """The compute stream that a copy is issued from; asking torch takes longer than a mark that
    knows it."""
    marks = (point.stream for point in after if isinstance(point, Mark))
    found = next((stream for stream in marks if stream is not None), None)
    return streams.compute() if found is None else found


def reach(streams: Streams, point: Point) -> None:
    """Block the calling thread until the GPU has passed a mark or a copy; raises its error."""
    assert isinstance(point, CudaCopy | Mark)
    if isinstance(point, Mark):
        with suppress(Exception) if point.quiet else nullcontext():
            streams.synchronize(point.event)
        return
    point.await_issued()
    try:
        point.synchronize(streams)
    except Exception as error:
        point.error = point.error or bare(error)
    if point.error is not None:
        raise not_arrived(point.label, point.error)


def note_end(streams: Streams, copy: CudaCopy) -> int | None:
    """Record that a stream's copy has ended; returns its duration by the GPU's clock."""
    end_ns, took_ns = now_ns(), None
    if copy.began is not None and copy.event is not None and copy.error is None:
        took_ns = int(streams.elapsed_us(copy.began, copy.event) * 1e3)
    begin_ns = copy.began_ns if took_ns is None else end_ns - took_ns
    label = copy.label
    note(f"begin_{label.direction}", label.tag, copy.lane, begin_ns)
    note(f"end_{label.direction}", label.tag, copy.lane, end_ns, end_ns - begin_ns)
    return took_ns


def check_needs(copy: CudaCopy) -> None:
    for need in copy.needs:
        if need.error is not None:
            raise _needed(need, need.error)


def first_error(streams: Streams, copy: CudaCopy) -> BaseException | None:
    """Block until the GPU has passed the copy and those that it needs; returns the first error."""
    error: BaseException | None = None
    for one in (*copy.needs, copy):
        try:
            one.synchronize(streams)
        except Exception as found:
            error = error or (bare(found) if one is copy else _needed(one, bare(found)))
    return error


def _needed(need: CudaCopy, error: BaseException) -> Needed:
    told = Needed(f"{need.label.tag}: {error}")
    told.__cause__ = error
    return told
