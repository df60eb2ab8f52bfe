"""Errors of copies that failed, or had no room: tensor, direction, place, cause and remedy."""

from __future__ import annotations

import errno

import torch

from offcompile.ir import OffloadError

from .interface import Label, Slot
from .lanes import Needed


class DeviceFull(OffloadError, torch.OutOfMemoryError):
    """The device has no room for a tensor that is to be reloaded."""


_ADVICE = {
    errno.ENOSPC: 'free space there, or name a roomier directory with options={"spill": …}',
    errno.EDQUOT: 'the disk quota is used up: raise it, or set options={"spill": …}',
    errno.EIO: "the drive reports an error: look at its health and at the system log, and name "
    'another directory with options={"spill": …}',
    errno.ENOMEM: 'the system is out of memory: lower options={"memory": …}',
}


def failure(error: BaseException, direction: str, tag: str, slot: Slot) -> OffloadError:
    """The error to raise where the data is needed; `error` stays its cause."""
    root = error
    while isinstance(root, OffloadError) and root.__cause__ is not None:
        root = root.__cause__
    doing = "copied out to" if direction == "out" else "loaded from"
    # the load never ran because the copy out that it needs had failed
    also = " (it had not been written there)" if isinstance(error, Needed) else ""
    code = root.errno if isinstance(root, OSError) else None
    advice = _ADVICE.get(code or 0, 'name another directory with options={"spill": …}')
    why = root.strerror if isinstance(root, OSError) and root.strerror else str(root)
    told = OffloadError(
        f"{tag} ({slot.nbytes} bytes) could not be {doing} {slot.where}{also}: "
        f"{why or type(root).__name__}. The parameters were not touched by this copy; to go on, "
        f"{advice}."
    )
    told.__cause__ = error
    return told


def no_room(device: str, slot: Slot, error: torch.OutOfMemoryError) -> DeviceFull:
    """The error for a load whose buffer the device cannot allocate."""
    return DeviceFull(
        f"{device} is out of memory: a tensor of {slot.nbytes} bytes could not come back. Lower "
        'options={"memory": …}, or leave more of the device to this process. It said: '
        f"{error}"
    )


def not_arrived(label: Label, error: BaseException) -> OffloadError:
    """The error for a caller on the host that waited for a copy that failed."""
    told = OffloadError(f"{label.tag} did not arrive on the host: {error or type(error).__name__}")
    told.__cause__ = error
    return told
