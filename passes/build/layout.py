"""Computes static offsets for the tensors of a plan, and the arena size they need.

FlashNeuron avoids fragmentation of its arena by placing long-lived tensors from one end and
short-lived ones from the other. Here lifetimes are known, so each tensor is placed first-fit among
the tensors of its end with an overlapping lifetime; several thresholds between long and short are
tried. Any extent above the peak is waste due to the placement, not to the order of frees.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

#: shares of stays (the shortest ones) tried at the far end
SHORT_SHARES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class AddressStay:
    """`nbytes` held from position `first` to position `last` of an order, inclusive."""

    nbytes: int
    first: int
    last: int

    def meets(self, other: AddressStay) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Layout:
    """The offset of each stay; stays that overlap in time do not overlap in memory.

    All of them end within `extent_bytes`.
    """

    offsets: tuple[int, ...]
    extent_bytes: int
    #: peak bytes held at one position: no layout needs less
    peak_bytes: int

    @property
    def waste(self) -> float:
        """The extent in excess of the peak, as a fraction of the peak."""
        return self.extent_bytes / self.peak_bytes - 1 if self.peak_bytes else 0.0


def lay_out(stays: Sequence[AddressStay]) -> Layout:
    """Returns the smallest of the layouts tried; deterministic."""
    peak = peak_bytes(stays)
    best: Layout | None = None
    for share in SHORT_SHARES:
        for largest_first in (False, True):
            offsets, extent = _two_ended(stays, share, largest_first)
            if best is None or extent < best.extent_bytes:
                best = Layout(offsets, extent, peak)
            if extent == peak:
                return best
    assert best is not None
    return best


def peak_bytes(stays: Iterable[AddressStay]) -> int:
    """Returns the most bytes held at one position."""
    changes: dict[int, int] = {}
    for stay in stays:
        changes[stay.first] = changes.get(stay.first, 0) + stay.nbytes
        changes[stay.last + 1] = changes.get(stay.last + 1, 0) - stay.nbytes
    return max(accumulate(changes[at] for at in sorted(changes)), default=0)


def _two_ended(
    stays: Sequence[AddressStay], short_share: float, largest_first: bool
) -> tuple[tuple[int, ...], int]:
    """Returns offsets and extent with the shortest stays placed from the end, others from 0."""
    by_length = sorted(range(len(stays)), key=lambda i: (stays[i].last - stays[i].first, i))
    short = set(by_length[: int(short_share * len(stays))])

    def rank(i: int) -> tuple[int, int, int]:
        stay = stays[i]
        return (-stay.nbytes if largest_first else stay.first, -stay.last, i)

    order = sorted(range(len(stays)), key=rank)
    near = _first_fit(stays, [i for i in order if i not in short])
    far = _first_fit(stays, [i for i in order if i in short])
    alone = (at + stays[i].nbytes for end in (near, far) for i, at in end.items())
    together = (
        at + stays[i].nbytes + other + stays[j].nbytes
        for i, at in near.items()
        for j, other in far.items()
        if stays[i].meets(stays[j])
    )
    extent = max([*alone, *together], default=0)
    near.update((i, extent - at - stays[i].nbytes) for i, at in far.items())
    return tuple(near[i] for i in range(len(stays))), extent


def _first_fit(stays: Sequence[AddressStay], order: Sequence[int]) -> dict[int, int]:
    """Places each stay, in this order, at the lowest offset that is free during its lifetime."""
    offsets: dict[int, int] = {}
    for i in order:
        stay = stays[i]
        taken = sorted(
            (at, at + stays[j].nbytes) for j, at in offsets.items() if stays[j].meets(stay)
        )
        place = 0
        for begin, end in taken:
            if begin - place >= stay.nbytes:
                break
            place = max(place, end)
        offsets[i] = place
    return offsets
