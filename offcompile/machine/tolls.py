"""The compute time that moves cost on the CPU target, measured with the machine and its disks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from offcompile.ir import Machine
from offcompile.runtime.base.posix import usable_cores
from offcompile.runtime.measure.beside import copy_toll_share, disk_toll_share
from offcompile.runtime.measure.timing import machine_identity

from .cost_cache import (
    Identity,
    document_path,
    measured_here,
    positive_number,
    read_document,
    write_document,
)
from .hardware import HardwareProfile

#: compute-thread time per move, with the cold caches of a step: to start it and to notice its
#: completion (docs/backend.md)
ASKING_US = 300.0
#: time of its lane's thread per move, besides copying and packing; compute loses it like a copy's
LANE_US = 250.0
#: smallest shares that can be told from noise: of a copy's time, of a disk's
LEAST_TOLL, LEAST_DISK_TOLL = 0.1, 0.03
#: documents of the compute time lost to copies and to disks, and the least figure that they store
COPY_TOLL, DISK_TOLL, LEAST_SHARE = "copy-toll", "disk-toll", 0.001
#: the share lost to disks where every core computes, if it cannot be measured: 0.06 to 0.25 were
#: found in virtual machines
BUSY_DISK_SHARE = 0.15

Tell = Callable[[str], None]


def with_tolls(machine: Machine, profile: HardwareProfile) -> Machine:
    """Adds the tolls of moves, if they were measured on the machine itself."""
    share, disk_share = profile.copy_toll_share, profile.disk_toll_share or 0.0
    if not profile.measured or share is None:
        return machine
    share = share if share >= LEAST_TOLL else 0.0
    disk_share = disk_share if disk_share >= LEAST_DISK_TOLL else 0.0
    each_us = ASKING_US + share * LANE_US
    return replace(
        machine,
        lanes=tuple(
            replace(lane, toll_us=each_us, toll_share=share, bypass_share=disk_share)
            for lane in machine.lanes
        ),
    )


def copy_toll(refresh: bool, tell: Tell) -> float:
    """The share of a copy's time that compute loses: 1 if every core computes and it cannot be
    measured, 0 if one is free."""

    def measure() -> float | None:
        tell("measuring this machine: copies beside compute")
        return copy_toll_share()

    return _kept_or_measured(COPY_TOLL, machine_identity(), measure, 1.0, refresh)


def disk_toll(places: Sequence[tuple[Path, Identity]], refresh: bool, tell: Tell) -> float:
    """The share of a transfer's time that compute loses, on the disk where it loses most."""

    def of(place: Path, identity: Identity) -> float:
        def measure() -> float | None:
            tell(f"measuring compute beside the disk of {place}")
            return disk_toll_share(place)

        both = {**identity, **machine_identity()}
        return _kept_or_measured(DISK_TOLL, both, measure, BUSY_DISK_SHARE, refresh)

    return max(of(place, identity) for place, identity in places)


def _kept_or_measured(
    kind: str,
    identity: Identity,
    measure: Callable[[], float | None],
    if_every_core_computes: float,
    refresh: bool,
) -> float:
    """The share as cached or measured now. If other processes disturb the measurement, later
    processes measure again."""
    kept = None if refresh else positive_number((read_document(kind, identity) or {}).get("share"))
    if kept is not None:
        return kept
    here = measured_here(document_path(kind, identity))
    share = None
    if refresh or kind not in here:
        share = measure()
        here.add(kind)
    if share is None:
        return if_every_core_computes if torch.get_num_threads() >= usable_cores() else 0.0
    share = max(share, LEAST_SHARE)
    write_document(kind, identity, {"share": share})
    return share
