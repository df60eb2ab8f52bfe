"""Rings of host memory between a GPU and the disk, for lanes that go all the way in one move.

While the disk is busy with one chunk, the GPU's copy engine is at the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from offcompile.runtime.base.mapping import PAGE_BYTES, page_multiple
from offcompile.runtime.device.streams import Event, Stream, Streams
from offcompile.runtime.memory.host_arena import HostFull

from .copies import Blocks

#: of a ring; with two, tensors that are smaller than a chunk would hardly overlap
CHUNKS = 4

#: told of events behind what the GPU was given
Issued = Callable[[Event | None], None]


@dataclass(eq=False)
class Chunk:
    """Page-aligned host memory. `event`: behind the last copy of it that the GPU was given."""

    tensor: torch.Tensor
    event: Event | None = None

    def pages(self, nbytes: int) -> memoryview:
        """The whole pages that hold the first `nbytes`, for direct I/O."""
        return self.tensor.numpy()[: page_multiple(nbytes, PAGE_BYTES)].data


@dataclass(frozen=True)
class Step:
    """What is done with one chunk: the GPU's part, given to a stream, and the disk's."""

    by_gpu: Callable[[Stream, Chunk], None]
    by_disk: Callable[[Chunk], None]


class Ring:
    """Chunks of equal size, used in turn on one lane's thread and stream."""

    def __init__(
        self, streams: Streams, chunks: Sequence[torch.Tensor], from_arena: bool = True
    ) -> None:
        self._streams = streams
        self._chunks = deque(Chunk(tensor) for tensor in chunks)
        self.chunk_bytes = chunks[0].numel()
        #: whether all of it is the arena's memory
        self.from_arena = from_arena

    def write(self, stream: Stream, steps: Iterable[Step], issued: Issued) -> None:
        """Bring a tensor to the disk; returns, or raises, when the GPU and the disk are done.

        `issued` gets the event of the last copy out of the tensor, as soon as there is one; the
        GPU is given nothing of it after that.
        """
        event: Event | None = None
        waiting: deque[tuple[Chunk, Step]] = deque()
        try:
            for step in steps:
                if len(waiting) == len(self._chunks):
                    self._land(*waiting[0])
                    waiting.popleft()
                chunk = self._next()
                waiting.append((chunk, step))
                try:
                    step.by_gpu(stream, chunk)
                finally:  # what failed may have been given to the GPU in part
                    event = chunk.event = self._streams.record(stream)
            issued(event)
            while waiting:
                self._land(*waiting[0])
                waiting.popleft()
        finally:
            # not empty after an error: the GPU may still be reading the tensor
            for chunk, _ in waiting:
                self._settle(chunk)

    def read(self, stream: Stream, steps: Iterable[Step], issued: Issued) -> None:
        """Fill a tensor; returns when the last copy into it was given to the GPU.

        `issued` gets the event of each copy. The disk is ahead of the GPU by as much as the ring
        holds, also while `stream` waits for compute.
        """
        for step in steps:
            chunk = self._next()
            self._settle(chunk)
            step.by_disk(chunk)
            try:
                step.by_gpu(stream, chunk)
            finally:  # as above
                chunk.event = self._streams.record(stream)
                issued(chunk.event)

    def close(self) -> None:
        """Block until the GPU is done with all of it."""
        for chunk in self._chunks:
            self._settle(chunk)

    def _next(self) -> Chunk:
        """The chunk that was used longest ago."""
        self._chunks.rotate(-1)
        return self._chunks[-1]

    def _land(self, chunk: Chunk, step: Step) -> None:
        self._streams.synchronize(chunk.event)
        step.by_disk(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """Block until the GPU is done with the chunk."""
        if chunk.event is not None:
            # what went wrong is for those to tell whose copy it was
            with suppress(Exception):
                self._streams.synchronize(chunk.event)


def ring_in(streams: Streams, arena: Blocks, chunk_bytes: int) -> Ring:
    """One whose chunks lie in the arena, as far as that has room."""
    chunks = [_chunk(arena, chunk_bytes) for _ in range(CHUNKS)]
    return Ring(streams, [tensor for tensor, _ in chunks], all(pinned for _, pinned in chunks))


def _chunk(arena: Blocks, nbytes: int) -> tuple[torch.Tensor, bool]:
    """And whether the arena had room for it."""
    try:
        return arena.block(nbytes, PAGE_BYTES).tensor, True
    except HostFull:
        # a host tier without room is what disks are there for: slower, but it moves
        room = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
        start = -room.data_ptr() % PAGE_BYTES
        return room[start : start + nbytes], False
