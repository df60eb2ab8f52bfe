"""Which side makes each update of a step that is planned already: list scheduling.

Every gradient goes to whichever of host and device would end its update first. The host works
through its own one by one. For the device a weight's states cross to it and back, in what time the
plan's own moves leave the links.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """A gradient that is there, and what its update takes on either side."""

    weight: str
    ready_ns: int
    host_ns: int
    device_ns: int
    in_ns: int
    out_ns: int


class Idle:
    """The time that a lane has left between what it does anyway."""

    def __init__(self, busy: Iterable[tuple[int, int]]) -> None:
        merged: list[tuple[int, int]] = []
        for start, end in sorted(busy):
            if merged and start <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((start, end))
        self._busy = merged
        self._ends = [end for _, end in merged]

    def end_of(self, start_ns: int, takes_ns: int) -> int:
        """When work is over that may begin at `start_ns` and makes way for the rest."""
        at = start_ns
        for start, end in self._busy[bisect_right(self._ends, start_ns) :]:
            if start - at >= takes_ns:
                break
            takes_ns -= max(0, start - at)
            at = max(at, end)
        return at + takes_ns


def updated_on_device(
    gradients: Sequence[Ready],
    incoming: Iterable[tuple[int, int]],
    outgoing: Iterable[tuple[int, int]],
) -> frozenset[str]:
    """The weights that the device is to update. incoming, outgoing: when the links are busy."""
    into, out = Idle(incoming), Idle(outgoing)
    host_ns = in_ns = device_ns = out_ns = 0
    found = set()
    for g in sorted(gradients, key=lambda g: (g.ready_ns, g.weight)):
        by_host = max(host_ns, g.ready_ns) + g.host_ns
        # states may come before the gradient does
        there = into.end_of(in_ns, g.in_ns)
        made = max(there, g.ready_ns, device_ns) + g.device_ns
        back = out.end_of(max(out_ns, made), g.out_ns)
        if by_host <= back:
            host_ns = by_host
        else:
            in_ns, device_ns, out_ns = there, made, back
            found.add(g.weight)
    return frozenset(found)
