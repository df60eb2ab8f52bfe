"""Figures that a record carries beside its plan: the memory around it, and what a run can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from offcompile.planning.feedback.measured import Steps
from offcompile.runtime.disk.drive_life import DriveLife
from offcompile.runtime.memory.malloc.fragmentation import HeapLimit


@dataclass(frozen=True)
class PlannedMemory:
    """The budget of a graph, and the parts of it that its plan may not use."""

    budget_bytes: int
    #: part that the runtime itself uses
    reserve_bytes: int = 0
    #: part that the plan also leaves free, for holes between tensors
    holes_bytes: int = 0
    #: peak of the plan in the order that runs, at any lane speed; None if the timeline's peak
    #: applies
    worst_peak_bytes: int | None = None
    #: bytes that others held on the device at planning time, outside the budget
    beside_bytes: int = 0
    #: device memory that blocks and holes may fill; None if the device gives nothing back
    room: HeapLimit | None = None
    #: time to touch memory that was given back; 0 if unknown or already part of the costs
    touch_us_per_mib: float = 0.0


@dataclass(frozen=True)
class RunFigures:
    """Where the measurements of a graph come from; nothing by default, as nothing runs."""

    #: delivers measurements that are still pending, such as those of CUDA events
    settle: Callable[[], None] | None = None
    #: maps the time of a step to the wear on the drives that hold spill files
    life: Callable[[float], DriveLife | None] | None = None
    #: describes the data kept between the graphs that share the budget; None if there is none
    kept: Callable[[], str | None] | None = None
    #: the measured steps
    steps: Steps | None = None
    #: time that the user's optimizer takes after a step for weights that are on the host
    updates_us: float = 0.0
