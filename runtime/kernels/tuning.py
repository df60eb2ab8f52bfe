"""Chooses tile sizes from a few settings, by the amount of data to move.

Nothing is timed while a model runs. Callers that want better settings use `fastest` and pass its
result on.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from offcompile.ir import OffloadError


@dataclass(frozen=True)
class Config:
    """The bytes that a program moves at a time (in the wider of two types), and its warps."""

    tile_bytes: int
    warps: int

    def __post_init__(self) -> None:
        for what, value, least in (("tile", self.tile_bytes, 16), ("warps", self.warps, 1)):
            if value < least or value & (value - 1):
                raise OffloadError(f"{what} of {value} is not possible: a power of two >= {least}")


#: small tiles, so that little data still spreads over the device
SMALL = Config(tile_bytes=4096, warps=4)
MEDIUM = Config(tile_bytes=8192, warps=4)
#: each thread has four 16-byte accesses in flight
LARGE = Config(tile_bytes=16384, warps=8)
CANDIDATES = (SMALL, MEDIUM, LARGE)
SMALL_BYTES, MEDIUM_BYTES = 1 << 20, 32 << 20


def config_for(nbytes: int) -> Config:
    """Returns the setting for moving `nbytes`, by size alone."""
    if nbytes <= SMALL_BYTES:
        return SMALL
    return MEDIUM if nbytes <= MEDIUM_BYTES else LARGE


def fastest(
    time_us: Callable[[Config], float], candidates: Sequence[Config] = CANDIDATES
) -> Config:
    """Returns the fastest candidate, the first among equals."""
    return min(candidates, key=time_us)


def device_time_us(call: Callable[[], object], device: torch.device, runs: int = 10) -> float:
    """Returns the median time of `call` on the device's current stream, after a warm-up call."""
    taken: list[float] = []
    with torch.cuda.device(device):
        call()
        for _ in range(runs):
            begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            begin.record()
            call()
            end.record()
            end.synchronize()
            taken.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(taken)
