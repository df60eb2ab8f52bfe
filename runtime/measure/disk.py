"""Measures how fast a directory writes and reads spilled data."""

from __future__ import annotations

import os

from offcompile.ir import OffloadError
from offcompile.runtime.disk.speed import DiskSpeed, speed_of
from offcompile.runtime.disk.spill import SpillStore


def measure_disk(directory: str | os.PathLike[str], seconds: float = 0.5) -> DiskSpeed:
    """Time writes and reads of a store in `directory` for `seconds`; leaves nothing behind."""
    if seconds <= 0:
        raise OffloadError(f"seconds={seconds}: give a positive time")
    with SpillStore([directory], reserve_bytes=0) as store:
        return speed_of(store, seconds)
