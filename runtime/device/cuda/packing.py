"""Packed copies of a GPU: kernels on the lane's stream pack evicted tensors and unpack reloads.

If kernels can use host memory in place, they write to it and read from it directly: only packed
bytes cross the bus, and the host need not know the size in advance. Otherwise the kernels work on
device staging, piece by piece, and the host waits for the size of each piece.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import torch

from offcompile.runtime.codecs import TensorCodec, codec
from offcompile.runtime.codecs.kinds import Bitmask
from offcompile.runtime.codecs.layout import OFFSET_BYTES
from offcompile.runtime.device.packing import elements_in, ranges
from offcompile.runtime.device.streams import Stream, Streams

from .copies import CopyBlock, HostSlot

#: alignment of the pieces' rooms
ROOM_BYTES = 256
#: kernels count in 32 bits, so larger tensors are packed in pieces
MOST_ELEMENTS = 1 << 28
#: device staging per lane, if packing needs it
DEVICE_STAGING_BYTES = 4 << 20


def used_bytes(codec: TensorCodec, packed: torch.Tensor, count: int, dtype: torch.dtype) -> int:
    """The bytes used in `packed`, in host memory, as the packed data itself states."""
    if not isinstance(codec, Bitmask):
        return codec.worst_bytes(count, dtype)
    layout = codec.layout(count, dtype)
    at = OFFSET_BYTES * layout.rows
    return layout.bytes_for(int(packed[at : at + OFFSET_BYTES].view(torch.int32).item()))


class PackingRooms:
    """The layout of a tensor's pieces in a block, each with room for its worst case."""

    def __init__(self, source: torch.Tensor, codec: TensorCodec, in_place: bool) -> None:
        self.codec, self.dtype, self.numel = codec, source.dtype, source.numel()
        staged = elements_in(DEVICE_STAGING_BYTES, codec, self.dtype)
        self.per_piece = MOST_ELEMENTS if in_place else staged

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """(first element, number of elements, offset in the block, bytes there) of each piece."""
        at = 0
        for start, count in ranges(self.numel, self.per_piece):
            worst = self.codec.worst_bytes(count, self.dtype)
            yield start, count, at, worst
            at += -(-worst // ROOM_BYTES) * ROOM_BYTES

    @property
    def nbytes(self) -> int:
        return max((at + worst for _, _, at, worst in self), default=0)


class PackedHostSlot(HostSlot):
    """A block of host memory for a tensor packed by a codec, whatever the tensor holds."""

    def __init__(self, block: CopyBlock, nbytes: int, pinned: bool, rooms: PackingRooms) -> None:
        super().__init__(block, nbytes, pinned)
        self.rooms = rooms
        #: bytes used by each piece, once `look` has read them
        self.used: tuple[int, ...] | None = None

    @property
    def crossed_bytes(self) -> int:
        return self.nbytes if self.used is None else sum(self.used)

    def look(self) -> None:
        """Record the packed sizes; the calling thread has seen the copy out end."""
        if self.used is not None:
            return
        rooms, host = self.rooms, self.block.tensor
        self.used = tuple(
            used_bytes(rooms.codec, host[at : at + worst], count, rooms.dtype)
            for _, count, at, worst in rooms
        )

    def pack(self, packer: Packer, stream: Stream, flat: torch.Tensor) -> None:
        for start, count, at, worst in self.rooms:
            room = self.block.tensor[at : at + worst]
            packer.pack(stream, self.rooms.codec, flat[start : start + count], room)

    def unpack(self, packer: Packer, stream: Stream, flat: torch.Tensor) -> None:
        for start, count, at, worst in self.rooms:
            room = self.block.tensor[at : at + worst]
            packer.unpack(stream, self.rooms.codec, room, flat[start : start + count])


class Packer(ABC):
    """Queues kernels on `stream` that pack into host memory and unpack from it."""

    #: device memory that it holds
    nbytes = 0

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    @abstractmethod
    def pack(
        self, stream: Stream, codec: TensorCodec, flat: torch.Tensor, room: torch.Tensor
    ) -> None:
        """Pack `flat` into `room`, flat uint8 on the host of at least the worst-case size."""

    @abstractmethod
    def unpack(
        self, stream: Stream, codec: TensorCodec, room: torch.Tensor, flat: torch.Tensor
    ) -> None:
        """Unpack `room` into `flat`, after earlier packing into `room` on `stream`."""


class PackedInPlace(Packer):
    """Packs and unpacks in place: kernels write and read host memory."""

    def pack(
        self, stream: Stream, codec: TensorCodec, flat: torch.Tensor, room: torch.Tensor
    ) -> None:
        self.streams.pack(stream, codec, flat, room)

    def unpack(
        self, stream: Stream, codec: TensorCodec, room: torch.Tensor, flat: torch.Tensor
    ) -> None:
        self.streams.unpack(stream, codec, room, flat)


class Aside(Packer):
    """Packs through device staging, for one lane's thread; waits for the size of each piece.

    The staging is reused at once: on one stream, packing runs after earlier copies.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self._staging: torch.Tensor | None = None
        self._head = torch.empty(OFFSET_BYTES, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return 0 if self._staging is None else self._staging.numel()

    def pack(
        self, stream: Stream, codec: TensorCodec, flat: torch.Tensor, room: torch.Tensor
    ) -> None:
        staging = self._room(stream, codec.worst_bytes(flat.numel(), flat.dtype))
        self.streams.pack(stream, codec, flat, staging)
        size = self._size(stream, codec, staging, flat)
        self.streams.copy(stream, room[:size], staging[:size])

    def _size(
        self, stream: Stream, codec: TensorCodec, staging: torch.Tensor, flat: torch.Tensor
    ) -> int:
        worst = codec.worst_bytes(flat.numel(), flat.dtype)
        if not isinstance(codec, Bitmask):
            return worst
        layout = codec.layout(flat.numel(), flat.dtype)
        at = OFFSET_BYTES * layout.rows
        self.streams.copy(stream, self._head, staging[at : at + OFFSET_BYTES])
        self.streams.synchronize(self.streams.record(stream))
        return layout.bytes_for(int(self._head.view(torch.int32).item()))

    def unpack(
        self, stream: Stream, codec: TensorCodec, room: torch.Tensor, flat: torch.Tensor
    ) -> None:
        staging = self._room(stream, codec.worst_bytes(flat.numel(), flat.dtype))
        # the host must see the bytes that it reads the size from
        self.streams.synchronize(self.streams.record(stream))
        size = used_bytes(codec, room, flat.numel(), flat.dtype)
        self.streams.copy(stream, staging[:size], room[:size])
        self.streams.unpack(stream, codec, staging, flat)

    def _room(self, stream: Stream, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None  # freed before the new one is allocated
            self._staging = self.streams.scratch(stream, nbytes)
        return self._staging


class Packers:
    """The packers of one device; `pinned`: its host memory is pinned.

    nbytes: device memory that they hold.
    """

    def __init__(self, streams: Streams, pinned: bool) -> None:
        self.streams = streams
        self._pinned = pinned
        self._in_place = PackedInPlace(streams)
        self._asides: dict[str, Aside] = {}

    @property
    def nbytes(self) -> int:
        return sum(packer.nbytes for packer in tuple(self._asides.values()))

    def codec(self, name: str) -> TensorCodec | None:
        """The codec; None, with a warning, if kernels cannot run: tensors then move unpacked."""
        kind = codec(name)
        reason = self.streams.why_not_pack(in_place=False)
        if reason is None:
            return kind
        warnings.warn(f"Tensors move unpacked, which takes longer: {reason}", stacklevel=2)
        return None

    @cached_property
    def in_place(self) -> bool:
        """True if kernels reach the host memory."""
        return self._pinned and self.streams.why_not_pack(in_place=True) is None

    def of(self, lane: str, in_place: bool) -> Packer:
        """The packer of one lane."""
        if in_place:
            return self._in_place
        packer = self._asides.get(lane)
        if packer is None:
            packer = self._asides[lane] = Aside(self.streams)
        return packer

    def close(self) -> None:
        self._asides.clear()
