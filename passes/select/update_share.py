"""Chooses the updates that the device runs while the host runs the others during backward.

The host takes the gradients that are ready first: they have all of backward to overlap with. The
last ones have nothing left to overlap with, so the device, which is done by then, updates those.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class HostRun:
    """An update on the host: when its operands are ready, and the time of each part.

    out_ns: to send its inputs to the host. back_ns: to return the values it changed.
    """

    ready_ns: int
    out_ns: int
    host_ns: int
    back_ns: int


@dataclass(frozen=True)
class UpdateTimes:
    """One weight's update. device_ns: its time on the device; device_bytes: its states there."""

    weight: str
    host: HostRun
    device_ns: int
    device_bytes: int = 0


def host_ends_ns(runs: Iterable[HostRun]) -> list[int]:
    """Returns when the host and both links finish none, one, two, … of the runs, in that order.

    Each resource works on its own. Weights return when the next forward pass needs them, so only
    the total of the return transfers counts.
    """
    ends, link, host, back = [0], 0, 0, 0
    for run in runs:
        link = max(link, run.ready_ns) + run.out_ns
        host = max(host, link) + run.host_ns
        back += run.back_ns
        ends.append(max(link, host, back))
    return ends


def device_share(
    updates: Sequence[UpdateTimes], compute_ns: int, room_bytes: int | None = None
) -> tuple[str, ...]:
    """Returns the weights that the device updates: the last ones, in the order of their gradients.

    Among the shares whose states fit `room_bytes` (None: all do) it picks the one that ends first,
    with the device running its updates after `compute_ns`; ties go to the one with most on the
    host.
    """
    ordered = sorted(updates, key=lambda u: u.host.ready_ns)
    device_ns, device_bytes = compute_ns, 0
    host_ends = host_ends_ns(update.host for update in ordered)
    best, best_ns = len(ordered), max(device_ns, host_ends[-1])
    for count in reversed(range(len(ordered))):
        device_ns += ordered[count].device_ns
        device_bytes += ordered[count].device_bytes
        if room_bytes is not None and device_bytes > room_bytes:
            break
        end_ns = max(device_ns, host_ends[count])
        if end_ns < best_ns:
            best, best_ns = count, end_ns
    return tuple(update.weight for update in ordered[best:])
