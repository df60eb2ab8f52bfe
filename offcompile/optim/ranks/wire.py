"""Sends flat tensors from their owners to all ranks of a process group.

Which collectives run, and how large they are, follows from sizes and owners alone. Memory may lie
differently on each rank: a weight that a plan has put on the host of one rank is sent through a
buffer there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .partition import TOGETHER_BYTES, Outline, Parcel, parcels

#: parcels under way at a time
AHEAD = 2


@dataclass(frozen=True)
class OwnedTensor:
    """A flat tensor that all ranks want as its owner has it. owner: a number within the group."""

    owner: int
    tensor: torch.Tensor
    #: kind of device that it is sent from
    device: str
    #: True if collectives may use its memory
    in_place: bool = True


@dataclass
class _UnderWay:
    parcel: Parcel
    work: Any
    buffer: torch.Tensor | None


class Wire:
    """The collectives of one process group. Every rank must ask for the same, in the same order."""

    def __init__(self, group: Any) -> None:
        distributed: Any = torch.distributed
        self.group = group
        self.members: list[int] = distributed.get_process_group_ranks(group)
        self.rank: int = distributed.get_rank(group)
        self.world = len(self.members)
        config = str(distributed.get_backend_config(group))
        self._devices = [part.partition(":")[0] for part in config.split(",")]

    def device_for(self, device: str) -> str:
        """The kind of device that collectives take tensors of this one from."""
        return device if device in self._devices else self._devices[0]

    def buffer_bytes(self) -> int:
        """Bytes of buffers for small tensors, at most."""
        return AHEAD * TOGETHER_BYTES

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of each number over all ranks. All are below 256."""
        distributed: Any = torch.distributed
        here = torch.tensor(numbers, dtype=torch.uint8, device=self.device_for("cpu"))
        distributed.all_reduce(here, op=distributed.ReduceOp.MAX, group=self.group)
        return [int(n) for n in here.tolist()]

    def meet(self) -> None:
        """Return once all ranks have called this."""
        self.largest([0])

    def gathered(self, mine: Any) -> list[Any]:
        """Return the object of each rank."""
        distributed: Any = torch.distributed
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, mine, group=self.group)
        return found

    def spread(self, items: Sequence[OwnedTensor]) -> None:
        """Overwrite each tensor with that of its owner."""
        outlines = [
            Outline(i.owner, (i.tensor.dtype, i.device), i.tensor.numel(), i.tensor.element_size())
            for i in items
        ]
        under_way: deque[_UnderWay] = deque()
        for parcel in parcels(outlines):
            if len(under_way) == AHEAD:
                self._end(items, under_way.popleft())
            under_way.append(self._begin(items, parcel))
        while under_way:
            self._end(items, under_way.popleft())

    def _begin(self, items: Sequence[OwnedTensor], parcel: Parcel) -> _UnderWay:
        first = items[parcel[0].position]
        buffer = None
        if len(parcel) == 1 and first.in_place and first.tensor.device.type == first.device:
            sent = first.tensor[parcel[0].start : parcel[0].stop]
        else:
            numel = sum(piece.stop - piece.start for piece in parcel)
            sent = buffer = torch.empty(numel, dtype=first.tensor.dtype, device=first.device)
            if first.owner == self.rank:
                self._copy(items, parcel, buffer, out=True)
        distributed: Any = torch.distributed
        owner = self.members[first.owner]
        work = distributed.broadcast(sent, owner, group=self.group, async_op=True)
        return _UnderWay(parcel, work, buffer)

    def _end(self, items: Sequence[OwnedTensor], under_way: _UnderWay) -> None:
        under_way.work.wait()
        owner = items[under_way.parcel[0].position].owner
        if under_way.buffer is not None and owner != self.rank:
            self._copy(items, under_way.parcel, under_way.buffer, out=False)

    def _copy(
        self, items: Sequence[OwnedTensor], parcel: Parcel, buffer: torch.Tensor, out: bool
    ) -> None:
        start = 0
        for piece in parcel:
            part = items[piece.position].tensor[piece.start : piece.stop]
            there = buffer[start : start + part.numel()]
            start += part.numel()
            (there if out else part).copy_(part if out else there)
