"""Wear of the drives by spilling: bytes written per step, and the resulting lifetime."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from offcompile.ir import DEVICE, HOST, Plan, Problem
from offcompile.planning.timelines import moved_bytes
from offcompile.runtime.base.once import made_once
from offcompile.runtime.disk.drive_life import DriveLife, DriveWatch, capacity_of, drive_life
from offcompile.runtime.moves.registry import RuntimeSettings, runtimes

SPILLED = "spilled tensors"
_FIX = (
    "Raise `memory` so that less has to leave, allow smaller copies "
    '(options={"lossy": "bf16"}), or name a drive with a higher rating with options={"spill": …}'
)
#: a drive's rated writes are spread over this many years to get its daily limit
YEARS = 5
_DAYS = 365.25


class SpillWatch:
    """Follows the writes of one runtime; warns once if a drive would wear out within a year."""

    def __init__(self, settings: RuntimeSettings, now_s: Callable[[], float] = time.monotonic):
        self._settings, self._now_s = settings, now_s
        self._drive: DriveWatch | None = None
        self._lock = threading.Lock()

    @property
    def life(self) -> DriveLife | None:
        """The lifetime at the rate measured so far; None if nothing was spilled to a disk, or for
        less than a minute."""
        return None if self._drive is None else self._drive.life

    def step_over(self) -> None:
        """Records the end of a run of a graph that spills."""
        found = [r for r in runtimes() if r.settings == self._settings]
        stores = [store for runtime in found for store in runtime.stores.values()]
        if not stores:
            return
        with self._lock:
            if self._drive is None:
                places = {place for store in stores for place in store.directories}
                try:
                    capacity_bytes = capacity_of(sorted(places))
                except OSError:  # a directory is gone: the copies themselves will fail
                    return
                self._drive = DriveWatch(max(capacity_bytes, 1), what=SPILLED, fix=_FIX)
            self._drive.step_over(sum(s.bytes_written for s in stores), self._now_s())


def watch_for(settings: RuntimeSettings) -> SpillWatch:
    """The watch of this runtime."""
    return made_once("watch of a runtime", settings.key, partial(SpillWatch, settings))


def spilled_bytes(problem: Problem, plan: Plan, target: str) -> int:
    """Bytes that a step of the plan writes to spill files, after packing by codecs.

    target: `cpu`, where both slow tiers are files, or `cuda`, where only the disk is.
    """
    memory = {DEVICE} if target == "cpu" else {DEVICE, HOST}
    homes = {tensor.id: tensor.home for tensor in problem.tensors}
    # tensors at home on the host of the CPU target are mapped files, written back by the OS
    return sum(
        moved_bytes(problem, move.tensor, move.codec)
        for move in plan.moves
        if move.target not in memory and move.source in memory and homes[move.tensor] != HOST
    )


def planned_life(
    problem: Problem, plan: Plan, settings: RuntimeSettings, step_us: float
) -> DriveLife | None:
    """The drives' lifetime if such steps repeat; None if they write nothing to drives."""
    written_bytes = spilled_bytes(problem, plan, settings.target.partition(":")[0])
    if not written_bytes or step_us <= 0 or not settings.directories:
        return None
    try:
        capacity_bytes = capacity_of(settings.directories)
    except OSError:  # a directory is gone: the copies themselves will fail
        return None
    return drive_life(written_bytes, step_us / 1e6, max(capacity_bytes, 1), what=SPILLED)


def daily_bytes(directory: str | Path) -> float:
    """Bytes that may be written each day to the drive of `directory` if it is to last 5 years."""
    rated = drive_life(0, 1.0, max(capacity_of([directory]), 1)).endurance_bytes
    return rated / (YEARS * _DAYS)
