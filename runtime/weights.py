"""Parameters whose memory is the host tier's: still ordinary parameters to everyone else."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .device import Device
from .registry import runtimes


def live_on_host(device: Device, parameters: Sequence[torch.Tensor]) -> int:
    """Give parameters memory on the host tier, one behind the other in the order given.

    Those that have it stay as they are. Each covers its storage. Returns how many were moved.
    """
    moving = [p for p in parameters if device.slot_of(p) is None]
    if not moving:
        return 0
    sizes = [p.untyped_storage().nbytes() for p in moving]
    with torch.no_grad():
        for parameter, flat in zip(moving, device.addressable(sizes), strict=True):
            host = flat.view(parameter.dtype).as_strided(parameter.size(), parameter.stride())
            host.copy_(parameter.detach())
            # what stood on the device goes with its last user
            parameter.data = host
    return len(moving)


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is the host tier's, of whichever runtime."""
    return any(runtime.device.slot_of(tensor) is not None for runtime in runtimes())
