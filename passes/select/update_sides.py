"""Assigns each update of an already planned step to host or device by list scheduling.

Every gradient goes to the side that would finish its update first. The host works through its
updates one by one. For the device, the states of a weight cross the links and return, in the time
that the plan's own moves leave free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ready:
    """A gradient that is ready, and the durations of its update on either side."""

    weight: str
    ready_ns: int
    host_ns: int
    device_ns: int
    in_ns: int
    out_ns: int


class Idle:
    """The time that a lane has left between its given transfers."""

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
        """Returns the end of work that may start at `start_ns` and yields to given transfers."""
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
    """Returns the weights that the device should update.

    incoming, outgoing: the busy times of the links.
    """
    into, out = Idle(incoming), Idle(outgoing)
    host_ns = in_ns = device_ns = out_ns = 0
    found = set()
    for g in sorted(gradients, key=lambda g: (g.ready_ns, g.weight)):
        by_host = max(host_ns, g.ready_ns) + g.host_ns
        # states may arrive before the gradient
        there = into.end_of(in_ns, g.in_ns)
        made = max(there, g.ready_ns, device_ns) + g.device_ns
        back = out.end_of(max(out_ns, made), g.out_ns)
        if by_host <= back:
            host_ns = by_host
        else:
            in_ns, device_ns, out_ns = there, made, back
            found.add(g.weight)
    return frozenset(found)
