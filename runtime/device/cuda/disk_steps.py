"""The steps of a ring, chunk by chunk, for a tensor between a GPU and the disk: raw or packed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch

from offcompile.runtime.base.counters import now_ns
from offcompile.runtime.device.cpu import CpuSlot
from offcompile.runtime.device.lane_rates import LaneRates
from offcompile.runtime.device.packing import PackedPiece, PackedSlot
from offcompile.runtime.device.streams import Stream, Streams

from .packing import Packer, used_bytes
from .staging import Chunk, StagingStep

#: (start, size) -> these bytes of the tensor, flat, on the device
Part = Callable[[int, int], torch.Tensor]


def raw_steps(
    streams: Streams, slot: CpuSlot, part: Part, chunk_bytes: int, outward: bool, begin: int = 0
) -> Iterator[StagingStep]:
    """Steps for the raw tensor from `begin` on, which is a multiple of the page size."""

    def copy(start: int, size: int, stream: Stream, chunk: Chunk) -> None:
        device, host = part(start, size), chunk.tensor[:size]
        streams.copy(stream, *((host, device) if outward else (device, host)))

    move = slot.store.write if outward else slot.store.read

    def at_disk(start: int, size: int, chunk: Chunk) -> None:
        move(slot.extent, start, chunk.pages(size))

    for start in range(begin, slot.nbytes, chunk_bytes):
        size = min(chunk_bytes, slot.nbytes - start)
        yield StagingStep(partial(copy, start, size), partial(at_disk, start, size))


def rated(
    rates: LaneRates, lane: str, nbytes: int, steps: Iterable[StagingStep]
) -> Iterator[StagingStep]:
    """The same steps, timed: adds the disk's time to the lane's rate once the last step is done."""
    busy_ns, left = 0, nbytes

    def at_disk(step: StagingStep, chunk: Chunk) -> None:
        nonlocal busy_ns, left
        began_ns = now_ns()
        step.by_disk(chunk)
        busy_ns += now_ns() - began_ns
        left -= chunk.tensor.numel()
        if left <= 0:
            rates.add(lane, nbytes, busy_ns)

    for step in steps:
        yield StagingStep(step.by_gpu, partial(at_disk, step))


def packing_steps(packer: Packer, slot: PackedSlot, flat: torch.Tensor) -> Iterator[StagingStep]:
    """Steps of a packed copy out; a chunk has room for the worst case of a piece."""
    slot.pieces = ()

    def pack(start: int, count: int, stream: Stream, chunk: Chunk) -> None:
        packer.pack(stream, slot.codec, flat[start : start + count], chunk.tensor)

    def write(start: int, count: int, chunk: Chunk) -> None:
        """Write behind the pieces packed before; the GPU has reported the size."""
        last = slot.pieces[-1:]
        at = last[0].at + last[0].padded_bytes if last else 0
        nbytes = used_bytes(slot.codec, chunk.tensor, count, slot.dtype)
        slot.store.write(slot.extent, at, chunk.pages(nbytes))
        slot.pieces += (PackedPiece(start, count, at, nbytes),)

    for start, count in slot.ranges():
        yield StagingStep(partial(pack, start, count), partial(write, start, count))


def unpacking_steps(packer: Packer, slot: PackedSlot, flat: torch.Tensor) -> Iterator[StagingStep]:
    """Steps of a packed load, one for each piece that was written."""

    def read(piece: PackedPiece, chunk: Chunk) -> None:
        slot.store.read(slot.extent, piece.at, chunk.pages(piece.nbytes))

    def unpack(piece: PackedPiece, stream: Stream, chunk: Chunk) -> None:
        part = flat[piece.start : piece.start + piece.count]
        packer.unpack(stream, slot.codec, chunk.tensor, part)

    for piece in slot.pieces:
        yield StagingStep(partial(unpack, piece), partial(read, piece))
