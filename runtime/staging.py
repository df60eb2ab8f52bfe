"""Rings of host memory between a GPU and the disk, for lanes that go all the way in one move.

While the disk is busy with one chunk, the GPU's copy engine is at the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch

from .cpu import CpuSlot
from .mapping import PAGE_BYTES, page_multiple
from .streams import Event, Stream, Streams

#: of a ring; with two, tensors that are smaller than a chunk would hardly overlap
CHUNKS = 4

#: (start, size) -> these bytes of the tensor, flat, on the device
Part = Callable[[int, int], torch.Tensor]


@dataclass(eq=False)
class Chunk:
    """Page-aligned host memory. `event`: behind the last copy of it that the GPU was given."""

    tensor: torch.Tensor
    event: Event | None = None

    def pages(self, nbytes: int) -> memoryview:
        """The whole pages that hold the first `nbytes`, for direct I/O."""
        return self.tensor.numpy()[: page_multiple(nbytes, PAGE_BYTES)].data


class Ring:
    """Chunks of equal size, used in turn on one lane's thread and stream."""

    def __init__(self, streams: Streams, chunks: Sequence[torch.Tensor]) -> None:
        self._streams = streams
        self._chunks = deque(Chunk(tensor) for tensor in chunks)
        self._chunk_bytes = chunks[0].numel()

    def write(
        self, stream: Stream, slot: CpuSlot, part: Part, issued: Callable[[Event | None], None]
    ) -> None:
        """Bring the tensor to the slot; returns, or raises, when the GPU and the disk are done.

        `issued` gets the event of the last copy out of the tensor, as soon as there is one; `part`
        is not called after that.
        """
        event: Event | None = None
        waiting: deque[tuple[Chunk, int, int]] = deque()
        try:
            for start in range(0, slot.nbytes, self._chunk_bytes):
                if len(waiting) == len(self._chunks):
                    self._land(slot, *waiting[0])
                    waiting.popleft()
                size = min(self._chunk_bytes, slot.nbytes - start)
                chunk = self._next()
                self._streams.copy(stream, chunk.tensor[:size], part(start, size))
                event = chunk.event = self._streams.record(stream)
                waiting.append((chunk, start, size))
            issued(event)
            while waiting:
                self._land(slot, *waiting[0])
                waiting.popleft()
        finally:
            # not empty after an error: the GPU may still be reading the tensor
            for chunk, _, _ in waiting:
                self._settle(chunk)

    def read(
        self, stream: Stream, slot: CpuSlot, part: Part, issued: Callable[[Event | None], None]
    ) -> None:
        """Fill the tensor; returns when the last copy into it was given to the GPU.

        `issued` gets the event of each copy. The disk is ahead of the GPU by as much as the ring
        holds, also while `stream` waits for compute.
        """
        for start in range(0, slot.nbytes, self._chunk_bytes):
            size = min(self._chunk_bytes, slot.nbytes - start)
            chunk = self._next()
            self._settle(chunk)
            slot.store.read(slot.extent, start, chunk.pages(size))
            self._streams.copy(stream, part(start, size), chunk.tensor[:size])
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

    def _land(self, slot: CpuSlot, chunk: Chunk, start: int, size: int) -> None:
        self._streams.synchronize(chunk.event)
        slot.store.write(slot.extent, start, chunk.pages(size))

    def _settle(self, chunk: Chunk) -> None:
        """Block until the GPU is done with the chunk."""
        if chunk.event is not None:
            # what went wrong is for those to tell whose copy it was
            with suppress(Exception):
                self._streams.synchronize(chunk.event)
