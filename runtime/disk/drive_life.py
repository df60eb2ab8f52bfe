"""Estimates how long a drive lasts at a given number of bytes written per step."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

from offcompile.ir import OffloadError

#: Typical write endurance of consumer drives: 600 TB written per TB of capacity.
WRITES_PER_CAPACITY = 600
#: A shorter life triggers a warning.
HORIZON_YEARS = 1.0
#: Rates measured over a shorter time are ignored.
LEAST_S = 60.0

OPTIMIZER_STATES = "optimizer states"
_STATES_FIX = (
    'Give the states more host memory (host_memory=), store them in bf16 (state_dtype="bf16", '
    "lossy), or name a drive with a higher rating"
)

_YEAR_S = 365.25 * 24 * 3600
_TB = 1e12


@dataclass(frozen=True)
class DriveLife:
    """The life of a drive, rated for `endurance_bytes` of writes, under training without pause."""

    written_bytes_per_step: int
    step_s: float
    endurance_bytes: float
    what: str = OPTIMIZER_STATES

    @property
    def years(self) -> float:
        """Life in years; infinite if nothing is written."""
        if not self.written_bytes_per_step:
            return float("inf")
        return self.endurance_bytes / self.written_bytes_per_step * self.step_s / _YEAR_S

    @property
    def steps(self) -> float:
        if not self.written_bytes_per_step:
            return float("inf")
        return self.endurance_bytes / self.written_bytes_per_step

    def lasts(self) -> str:
        """Returns the life as text, in a fitting unit."""
        return _span(self.years)

    def words(self) -> str:
        """Returns a one-line summary for people."""
        if not self.written_bytes_per_step:
            return f"{self.what}: nothing is written to disk"
        return (
            f"{self.what}: {self.written_bytes_per_step / 1e9:.3g} GB written per step of "
            f"{self.step_s:.3g} s; a drive rated for {self.endurance_bytes / _TB:.4g} TB written "
            f"lasts {self.lasts()} at this rate, without a pause"
        )


def _span(years: float) -> str:
    if years >= 2:
        return f"{years:.3g} years"
    days = years * 365.25
    return f"{days:.3g} days" if days >= 2 else f"{days * 24:.3g} hours"


def drive_life(
    written_bytes_per_step: int,
    step_s: float,
    capacity_bytes: int,
    endurance_bytes: float | None = None,
    what: str = OPTIMIZER_STATES,
) -> DriveLife:
    """Returns the life of a drive of `capacity_bytes`; `endurance_bytes`: its rating, if known."""
    if written_bytes_per_step < 0 or step_s <= 0 or capacity_bytes <= 0:
        raise OffloadError(
            f"no life of a drive follows from {written_bytes_per_step} bytes per step, steps of "
            f"{step_s} s and a capacity of {capacity_bytes} bytes: bytes per step may be 0, the "
            "others have to be positive"
        )
    if endurance_bytes is None:
        endurance_bytes = float(capacity_bytes) * WRITES_PER_CAPACITY
    return DriveLife(written_bytes_per_step, step_s, endurance_bytes, what)


def capacity_of(directories: Sequence[str | os.PathLike[str]]) -> int:
    """Returns the total size of the file systems that hold `directories`, each counted once."""
    found = {}
    for directory in directories:
        told = os.statvfs(directory)
        found[os.stat(directory).st_dev] = told.f_blocks * told.f_frsize
    return sum(found.values())


class DriveWarning(UserWarning):
    """Warns that a drive would soon be worn out."""


class DriveWatch:
    """Tracks a drive's life at the measured write rate; warns once if it ends before the horizon.

    what: the source of the writes. fix: the advice in the warning.

    The rate is averaged over all steps but the first, and is ignored before LEAST_S have passed.
    """

    def __init__(
        self,
        capacity_bytes: int,
        endurance_bytes: float | None = None,
        horizon_years: float = HORIZON_YEARS,
        what: str = OPTIMIZER_STATES,
        fix: str = _STATES_FIX,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._endurance_bytes = endurance_bytes
        self._horizon_years = horizon_years
        self._what, self._fix = what, fix
        self._first: tuple[int, float] | None = None
        self._steps = 0
        self._has_warned = False
        self.life: DriveLife | None = None

    def step_over(self, written_bytes: int, now_s: float) -> None:
        """Record that a step ended at `now_s`, with `written_bytes` written in total so far."""
        if self._first is None or written_bytes < self._first[0]:
            # files were closed, and new ones count from zero
            self._first, self._steps = (written_bytes, now_s), 0
            return
        self._steps += 1
        passed_s = now_s - self._first[1]
        if passed_s < LEAST_S:
            return
        per_step = (written_bytes - self._first[0]) // self._steps
        self.life = drive_life(
            per_step,
            passed_s / self._steps,
            self._capacity_bytes,
            self._endurance_bytes,
            self._what,
        )
        if self.life.years < self._horizon_years and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"{self.life.words()}. {self._fix}",
                DriveWarning,
                stacklevel=2,
            )
