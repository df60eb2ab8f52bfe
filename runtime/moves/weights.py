"""Moves parameters' memory to the host tier and back; they remain ordinary parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offcompile.runtime.device.interface import Device, Slot
from offcompile.runtime.device.owners import has_others, why_it_stays

from .registry import runtimes


def live_on_host(device: Device, parameters: Sequence[torch.Tensor]) -> tuple[int, int]:
    """Give parameters memory on the host tier, one after another in the order given.

    Parameters already there stay as they are, and so do those whose memory is shared
    (`why_it_stays`). One that has been written to in memory that ranks have in common gets memory
    of its own. Each parameter must cover its storage. Returns how many moved, and how many had to
    stay.
    """
    moving, staying = [], 0
    for parameter in parameters:
        slot = device.slot_of(parameter)
        if slot is not None:
            slot.planned = True
            if slot.is_written and why_it_stays(parameter) is None:
                moving.append(parameter)
        elif why_it_stays(parameter) is None:
            moving.append(parameter)
        else:
            staying += 1
    if not moving:
        return 0, staying
    sizes = [p.untyped_storage().nbytes() for p in moving]
    left = [p.detach() for p in moving if p.device.type != "cpu"]
    # tensors created in inference mode could not be trained later
    with torch.inference_mode(False), torch.no_grad():
        for parameter, flat in zip(moving, device.addressable(sizes), strict=True):
            host = flat.view(parameter.dtype).as_strided(parameter.size(), parameter.stride())
            host.copy_(parameter.detach())
            parameter.data = host
            slot = device.slot_of(parameter)
            assert slot is not None
            slot.planned = True
    # The memory that they leave is freed with its last user. It may belong to another stream than
    # this one, whose work would not wait for the copies.
    copied = device.mark()
    if copied is not None:
        device.reached(copied)
    left.clear()
    return len(moving), staying


def live_on_device(parameters: Sequence[torch.Tensor]) -> int:
    """Move parameters that were created on the host to the device; returns how many.

    Parameters that another plan wants on the host stay there, and so do those whose memory is
    shared, because moving them would break the sharing.
    """
    moved = 0
    with torch.inference_mode(False), torch.no_grad():
        for parameter in parameters:
            slot = _slot_of(parameter)
            if slot is None or slot.planned or has_others(parameter):
                continue
            here = torch.empty_strided(
                parameter.size(), parameter.stride(), dtype=parameter.dtype, device=parameter.device
            )
            parameter.data = here.copy_(parameter.detach())
            moved += 1
    return moved


def is_on_host(tensor: torch.Tensor) -> bool:
    """True if the tensor's memory is on the host tier of any runtime."""
    return _slot_of(tensor) is not None


def is_there_by_plan(tensor: torch.Tensor) -> bool:
    """True if a plan put the tensor on the host; otherwise it may still move to the device."""
    slot = _slot_of(tensor)
    return slot is not None and slot.planned


def device_of(tensor: torch.Tensor) -> Device | None:
    """The device whose host tier holds the tensor's memory."""
    devices = (runtime.device for runtime in runtimes())
    return next((d for d in devices if d.slot_of(tensor) is not None), None)


def claim(parameters: Iterable[torch.Tensor]) -> None:
    """Return when nothing holds the memory of these parameters any more (`Device.hold`)."""
    devices = [r.device for r in runtimes() if r.device.ever_held]
    if devices:
        for parameter in parameters:
            for device in devices:
                device.claim(parameter)


def _slot_of(tensor: torch.Tensor) -> Slot | None:
    found = (runtime.device.slot_of(tensor) for runtime in runtimes())
    return next((slot for slot in found if slot is not None), None)
