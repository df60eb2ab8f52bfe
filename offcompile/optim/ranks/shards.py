"""Finds the part of a tensor that this rank holds: FSDP2 and tensor parallelism make DTensors.

Updates and states are of that part. `state_dict()` and `state` give out DTensors again, placed like
their parameters, so that torch.distributed.checkpoint can save and reshard them.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from offcompile.ir import OffloadError

_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def is_sharded(tensor: torch.Tensor) -> bool:
    """True for a DTensor, even one that each rank holds whole."""
    if type(tensor) in _ORDINARY:
        return False
    # no DTensor exists before its module is imported, which takes a while
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of the tensor on this rank, not a copy; the tensor itself if it is plain."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    with torch.no_grad():
        part = sharded.to_local()
        if hasattr(part, "wait"):  # still under way, as a collective of tensor parallelism gives it
            part = part.wait()
    found: torch.Tensor = part
    return found


def local_state(state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a loaded state: a DTensor, or the whole state on each rank."""
    if not is_sharded(parameter) or is_sharded(state):
        return local_like(state, parameter)
    from torch.distributed.tensor import distribute_tensor

    of: Any = parameter
    # every rank has all of it and takes its part: without a source, nothing is sent
    return local(distribute_tensor(state, of.device_mesh, of.placements, src_data_rank=None))


def local_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of a gradient that belongs to the parameter's part on this rank. A plain
    tensor is taken for that part."""
    if not is_sharded(parameter) or not is_sharded(tensor):
        return tensor
    of: Any = parameter
    sharded: Any = tensor
    if sharded.device_mesh != of.device_mesh:
        raise OffloadError(
            f"A tensor on {sharded.device_mesh} cannot update a parameter on {of.device_mesh}:"
            " give both one mesh"
        )
    if sharded.placements != of.placements:
        with torch.no_grad():
            sharded = sharded.redistribute(placements=of.placements)
    return local(sharded)


def sharded_like(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Make this rank's part of a state a DTensor, if its parameter is one."""
    if not is_sharded(parameter):
        return part
    from torch.distributed.tensor import DTensor

    of: Any = parameter
    made: torch.Tensor = DTensor.from_local(
        part,
        of.device_mesh,
        of.placements,
        run_check=False,
        shape=of.shape,
        stride=of.stride(),
    )
    return made


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor on every rank: a collective if it is sharded."""
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    gathered: torch.Tensor = sharded.full_tensor()
    return gathered


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows when the tensor is written to. FSDP2 adds to the local part of a
    gradient, which the DTensor around it does not count."""
    return tensor._version + local(tensor)._version if is_sharded(tensor) else tensor._version


def mesh_of(tensor: torch.Tensor) -> Any:
    """Return the mesh that a tensor is spread over; None if it is plain."""
    sharded: Any = tensor
    return sharded.device_mesh if is_sharded(tensor) else None
