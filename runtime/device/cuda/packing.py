"""Packed copies of a GPU: kernels on the lane's stream pack what leaves and unpack what returns.

Where kernels can use host memory in place they write there, and read from there: only what is
packed crosses, and nobody on the host has to know how much that is before it is there. Elsewhere
the kernels work on staging of the device, piece by piece, and the host waits for each one's size.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property

import torch

from offcompile.runtime.codecs import Codec, codec
from offcompile.runtime.codecs.kinds import Bitmask
from offcompile.runtime.codecs.layout import OFFSET_BYTES
from offcompile.runtime.device.packing import elements_in, ranges
from offcompile.runtime.device.streams import Stream, Streams

from .copies import Block, HostSlot

#: rooms of pieces begin at multiples of this
ROOM_BYTES = 256
#: kernels count in 32 bits, so larger tensors leave in pieces
MOST_ELEMENTS = 1 << 28
#: of the device, where packing needs staging: for each lane
DEVICE_STAGING_BYTES = 4 << 20


def used_bytes(codec: Codec, packed: torch.Tensor, count: int, dtype: torch.dtype) -> int:
    """What `packed`, in host memory, takes of its room: it says so itself."""
    if not isinstance(codec, Bitmask):
        return codec.worst_bytes(count, dtype)
    layout = codec.layout(count, dtype)
    at = OFFSET_BYTES * layout.rows
    return layout.bytes_for(int(packed[at : at + OFFSET_BYTES].view(torch.int32).item()))


class Rooms:
    """Where in a block the pieces of a tensor go, each with room for its worst case."""

    def __init__(self, source: torch.Tensor, codec: Codec, in_place: bool) -> None:
        self.codec, self.dtype, self.numel = codec, source.dtype, source.numel()
        staged = elements_in(DEVICE_STAGING_BYTES, codec, self.dtype)
        self.per_piece = MOST_ELEMENTS if in_place else staged

    def __iter__(self) -> Iterator[tuple[int, int, int, int]]:
        """(first element, how many, where in the block, bytes there) of each piece."""
        at = 0
        for start, count in ranges(self.numel, self.per_piece):
            worst = self.codec.worst_bytes(count, self.dtype)
            yield start, count, at, worst
            at += -(-worst // ROOM_BYTES) * ROOM_BYTES

    @property
    def nbytes(self) -> int:
        return max((at + worst for _, _, at, worst in self), default=0)


class PackedHostSlot(HostSlot):
    """A block of host memory for a tensor as a codec leaves it, whatever the tensor holds."""

    def __init__(self, block: Block, nbytes: int, pinned: bool, rooms: Rooms) -> None:
        super().__init__(block, nbytes, pinned)
        self.rooms = rooms
        #: what each piece takes, once somebody has looked
        self.used: tuple[int, ...] | None = None

    @property
    def crossed_bytes(self) -> int:
        return self.nbytes if self.used is None else sum(self.used)

    def look(self) -> None:
        """The copy out has ended, as the calling thread has seen: note what it took."""
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
    """Gives `stream` what packs into host memory, and what unpacks from it."""

    #: device memory that it holds
    nbytes = 0

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    @abstractmethod
    def pack(self, stream: Stream, codec: Codec, flat: torch.Tensor, room: torch.Tensor) -> None:
        """room: flat uint8 on the host, the worst case or more."""

    @abstractmethod
    def unpack(self, stream: Stream, codec: Codec, room: torch.Tensor, flat: torch.Tensor) -> None:
        """What packed into `room` comes before on `stream`."""


class InPlace(Packer):
    """Kernels write and read host memory."""

    def pack(self, stream: Stream, codec: Codec, flat: torch.Tensor, room: torch.Tensor) -> None:
        self.streams.pack(stream, codec, flat, room)

    def unpack(self, stream: Stream, codec: Codec, room: torch.Tensor, flat: torch.Tensor) -> None:
        self.streams.unpack(stream, codec, room, flat)


class Aside(Packer):
    """By way of staging on the device, for one lane's thread: it waits for the size of each piece.

    The staging is used again at once: on one stream, what packs comes after what copied before.
    """

    def __init__(self, streams: Streams) -> None:
        super().__init__(streams)
        self._staging: torch.Tensor | None = None
        self._head = torch.empty(OFFSET_BYTES, dtype=torch.uint8, device="cpu")

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return 0 if self._staging is None else self._staging.numel()

    def pack(self, stream: Stream, codec: Codec, flat: torch.Tensor, room: torch.Tensor) -> None:
        staging = self._room(stream, codec.worst_bytes(flat.numel(), flat.dtype))
        self.streams.pack(stream, codec, flat, staging)
        size = self._size(stream, codec, staging, flat)
        self.streams.copy(stream, room[:size], staging[:size])

    def _size(self, stream: Stream, codec: Codec, staging: torch.Tensor, flat: torch.Tensor) -> int:
        worst = codec.worst_bytes(flat.numel(), flat.dtype)
        if not isinstance(codec, Bitmask):
            return worst
        layout = codec.layout(flat.numel(), flat.dtype)
        at = OFFSET_BYTES * layout.rows
        self.streams.copy(stream, self._head, staging[at : at + OFFSET_BYTES])
        self.streams.synchronize(self.streams.record(stream))
        return layout.bytes_for(int(self._head.view(torch.int32).item()))

    def unpack(self, stream: Stream, codec: Codec, room: torch.Tensor, flat: torch.Tensor) -> None:
        staging = self._room(stream, codec.worst_bytes(flat.numel(), flat.dtype))
        # the host has to see what it reads the size from
        self.streams.synchronize(self.streams.record(stream))
        size = used_bytes(codec, room, flat.numel(), flat.dtype)
        self.streams.copy(stream, staging[:size], room[:size])
        self.streams.unpack(stream, codec, staging, flat)

    def _room(self, stream: Stream, nbytes: int) -> torch.Tensor:
        if self._staging is None or self._staging.numel() < nbytes:
            self._staging = None  # before there is another
            self._staging = self.streams.scratch(stream, nbytes)
        return self._staging


class Packers:
    """Those of one device; `pinned`: whether its host memory is.

    nbytes: device memory that they hold.
    """

    def __init__(self, streams: Streams, pinned: bool) -> None:
        self.streams = streams
        self._pinned = pinned
        self._in_place = InPlace(streams)
        self._asides: dict[str, Aside] = {}

    @property
    def nbytes(self) -> int:
        return sum(packer.nbytes for packer in tuple(self._asides.values()))

    def codec(self, name: str) -> Codec | None:
        """None, with a warning, where kernels cannot run: then tensors move as they are."""
        kind = codec(name)
        reason = self.streams.why_not_pack(in_place=False)
        if reason is None:
            return kind
        warnings.warn(f"Tensors move unpacked, which takes longer: {reason}", stacklevel=2)
        return None

    @cached_property
    def in_place(self) -> bool:
        """Whether kernels reach the host memory."""
        return self._pinned and self.streams.why_not_pack(in_place=True) is None

    def of(self, lane: str, in_place: bool) -> Packer:
        """One lane's."""
        if in_place:
            return self._in_place
        packer = self._asides.get(lane)
        if packer is None:
            packer = self._asides[lane] = Aside(self.streams)
        return packer

    def close(self) -> None:
        self._asides.clear()
