"""Deals out parameters to ranks, and cuts tensors into parcels that are sent at once.

Every rank computes both by itself, and all must get the same: they depend on nothing but the order
of the tensors, their sizes and their owners.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

#: most bytes of small tensors that are sent together, and of one tensor that is sent at once
TOGETHER_BYTES, RANGE_BYTES = 1 << 20, 16 << 20


def partition(sizes: Sequence[int], held: Sequence[int]) -> list[int]:
    """Return the owner of each size: the largest first, each to the rank that has least.

    held: the bytes that each rank has already. Afterwards, no rank has more than another by more
    than the largest size, unless it had before.
    """
    loads = [(nbytes, rank) for rank, nbytes in enumerate(held)]
    heapq.heapify(loads)
    owners = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        nbytes, owners[i] = loads[0]
        heapq.heapreplace(loads, (nbytes + sizes[i], owners[i]))
    return owners


@dataclass(frozen=True)
class Outline:
    """A flat tensor to be sent. Only tensors of one kind go together."""

    owner: int
    kind: Hashable
    numel: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


@dataclass(frozen=True)
class ElementRange:
    """Elements [start, stop) of the tensor at this position."""

    position: int
    start: int
    stop: int


Parcel = tuple[ElementRange, ...]


def parcels(tensors: Sequence[Outline]) -> list[Parcel]:
    """Cut tensors into parcels of one owner and kind: ranges of large ones, small ones together.

    Owners take turns, so that they send at the same time.
    """
    by_owner: dict[int, list[Parcel]] = {}
    for owner in sorted({t.owner for t in tensors}):
        mine = [i for i, t in enumerate(tensors) if t.owner == owner and t.numel]
        by_owner[owner] = list(_of_one(tensors, mine))
    turns = itertools.zip_longest(*by_owner.values())
    return [parcel for turn in turns for parcel in turn if parcel is not None]


def _of_one(tensors: Sequence[Outline], positions: Sequence[int]) -> Iterator[Parcel]:
    small: dict[Hashable, list[int]] = {}
    for i in positions:
        if tensors[i].nbytes < TOGETHER_BYTES:
            small.setdefault(tensors[i].kind, []).append(i)
        else:
            yield from _ranges(i, tensors[i])
    for alike in small.values():
        yield from _together(tensors, alike)


def _ranges(position: int, tensor: Outline) -> Iterator[Parcel]:
    step = RANGE_BYTES // tensor.itemsize
    for start in range(0, tensor.numel, step):
        yield (ElementRange(position, start, min(start + step, tensor.numel)),)


def _together(tensors: Sequence[Outline], positions: Sequence[int]) -> Iterator[Parcel]:
    pieces: list[ElementRange] = []
    nbytes = 0
    for i in positions:
        if pieces and nbytes + tensors[i].nbytes > TOGETHER_BYTES:
            yield tuple(pieces)
            pieces, nbytes = [], 0
        pieces.append(ElementRange(i, 0, tensors[i].numel))
        nbytes += tensors[i].nbytes
    if pieces:
        yield tuple(pieces)
