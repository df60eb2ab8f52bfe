"""Accelerators other than CUDA on which the CUDA device's code runs, added by their users.

torch hides most of a device behind `torch.get_device_module(type)`, which has the functions of
`torch.cuda` for streams, events, memory and random numbers. An `Accelerator` says the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.once import made_once

from .pinning import Registrar

#: DLPack's code for devices that plug into torch (its device type PrivateUse1)
PLUGGED_IN = 12
#: functions of the device's module that the runtime and planning call
NEEDED = (
    *("Event", "Stream", "current_stream", "stream", "device", "current_device", "device_count"),
    *("is_available", "synchronize", "empty_cache", "memory_stats", "memory_allocated"),
    *("memory_reserved", "max_memory_allocated", "max_memory_reserved", "mem_get_info"),
    *("reset_peak_memory_stats", "get_rng_state", "set_rng_state"),
)


@dataclass(frozen=True)
class Accelerator:
    """A device type of torch's, and what its module does not offer.

    registrar: makes a `Registrar`, which pins host memory: copies of it run asynchronously, and
    kernels use it in place at its own address.
    dlpack_code: DLPack's code of the device, by which torch makes tensors of host memory.
    """

    type: str
    registrar: Callable[[], Registrar]
    dlpack_code: int = PLUGGED_IN


#: topic of `made_once`: per process, as torch's own table of device types
_ADDED = "accelerators that were added"


def add_accelerator(accelerator: Accelerator) -> None:
    """Let graphs on this device type be compiled, as those on CUDA; raises if functions lack."""
    kind = accelerator.type
    if kind in ("cpu", "cuda", "meta"):
        raise OffloadError(f"{kind} devices need not be added: offcompile has code of their own.")
    missing = [name for name in NEEDED if not hasattr(device_module(kind), name)]
    if missing:
        raise OffloadError(
            f"torch.{kind} lacks {', '.join(missing)}: give the device module these functions, with"
            " the arguments that torch.cuda's have."
        )
    _added()[kind] = accelerator


def accelerator(kind: str) -> Accelerator | None:
    """The accelerator added for a device type."""
    return _added().get(kind)


def accelerators() -> tuple[str, ...]:
    """Device types that were added."""
    return tuple(_added())


def _added() -> dict[str, Accelerator]:
    return made_once(_ADDED, None, dict)


def device_module(kind: str) -> Any:
    """The module of a device type, `torch.cuda` for "cuda". OffloadError if there is none."""
    try:
        return torch.get_device_module(kind)
    except (AssertionError, RuntimeError) as error:
        raise OffloadError(f"torch has no module for {kind} devices: {error}") from error
