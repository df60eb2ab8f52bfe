"""Rings of host memory between a GPU and the disk, for lanes that connect the two directly.

While the disk works on one chunk, the GPU's copy engine works on the next.
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

from .copies import CopyBlocks

#: chunks of a ring; with two, tensors smaller than a chunk would hardly overlap
CHUNKS = 4

#: called with events behind the work given to the GPU
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
class StagingStep:
    """The work on one chunk: the GPU's part, queued on a stream, and the disk's part."""

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
        #: True if all of its memory comes from the arena
        self.from_arena = from_arena

    def write(self, stream: Stream, steps: Iterable[StagingStep], issued: Issued) -> None:
        """Write a tensor to the disk; returns, or raises, when the GPU and the disk are done.

        `issued` gets the event of the last copy from the tensor as soon as that is queued; the GPU
        gets no more work on the tensor after that.
        """
        event: Event | None = None
        waiting: deque[tuple[Chunk, StagingStep]] = deque()
        try:
            for step in steps:
                if len(waiting) == len(self._chunks):
                    self._land(*waiting[0])
                    waiting.popleft()
                chunk = self._next()
                waiting.append((chunk, step))
                try:
                    step.by_gpu(stream, chunk)
                finally:  # a failed step may have queued part of its work
                    event = chunk.event = self._streams.record(stream)
            issued(event)
            while waiting:
                self._land(*waiting[0])
                waiting.popleft()
        finally:
            # not empty after an error: the GPU may still be reading the tensor
            for chunk, _ in waiting:
                self._settle(chunk)

    def read(self, stream: Stream, steps: Iterable[StagingStep], issued: Issued) -> None:
        """Fill a tensor; returns when the last copy into it was given to the GPU.

        `issued` gets the event of each copy. The disk reads ahead of the GPU by as much as the ring
        holds, even while `stream` waits for compute.
        """
        for step in steps:
            chunk = self._next()
            self._settle(chunk)
            step.by_disk(chunk)
            try:
                step.by_gpu(stream, chunk)
            finally:  # as in `write`
                chunk.event = self._streams.record(stream)
                issued(chunk.event)

    def close(self) -> None:
        """Block until the GPU is done with all chunks."""
        for chunk in self._chunks:
            self._settle(chunk)

    def _next(self) -> Chunk:
        """The least recently used chunk."""
        self._chunks.rotate(-1)
        return self._chunks[-1]

    def _land(self, chunk: Chunk, step: StagingStep) -> None:
        self._streams.synchronize(chunk.event)
        step.by_disk(chunk)

    def _settle(self, chunk: Chunk) -> None:
        """Block until the GPU is done with the chunk."""
        if chunk.event is not None:
            # errors are reported by the copy that caused them
            with suppress(Exception):
                self._streams.synchronize(chunk.event)


def ring_in(streams: Streams, arena: CopyBlocks, chunk_bytes: int) -> Ring:
    """A ring whose chunks lie in the arena, as far as the arena has room."""
    chunks = [_chunk(arena, chunk_bytes) for _ in range(CHUNKS)]
    return Ring(streams, [tensor for tensor, _ in chunks], all(pinned for _, pinned in chunks))


def _chunk(arena: CopyBlocks, nbytes: int) -> tuple[torch.Tensor, bool]:
    """A chunk, and True if the arena had room for it."""
    try:
        return arena.block(nbytes, PAGE_BYTES).tensor, True
    except HostFull:
        # disks are meant for a full host tier: slower, but the tensor moves
        room = torch.empty(nbytes + PAGE_BYTES, dtype=torch.uint8, device="cpu")
        start = -room.data_ptr() % PAGE_BYTES
        return room[start : start + nbytes], False
