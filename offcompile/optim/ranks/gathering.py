"""Gathers the states of all ranks, as `state_dict()` of an unsharded optimizer has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch

from offcompile.optim.layout import flat, shaped_like
from offcompile.runtime.device.mapped import MappedStore

from .sharding import Sharding
from .wire import OwnedTensor

State = defaultdict[torch.Tensor, Any]
#: a parameter's states: the type of each tensor in its shape, and its other values
Described = tuple[dict[str, torch.dtype], dict[str, Any]]


def gathered(
    sharding: Sharding, keys: Mapping[torch.Tensor, int], own: State, room: MappedStore
) -> State:
    """Return the states of all parameters; those of other ranks get memory of `room`, on disk.

    keys: of all parameters, in their order. own: the states of this rank. A collective.
    """
    mine = {
        key: _described(own[p], p) for p, key in keys.items() if sharding.owns(key) and own.get(p)
    }
    known: dict[int, Described] = {}
    for told in sharding.gathered(mine):
        known |= told

    def placed() -> State:
        """Return the known states of all ranks, with memory for those of other ranks."""
        found: State = defaultdict(dict, {k: v for k, v in own.items() if k not in keys})
        for parameter, key in keys.items():
            if key in mine:
                found[parameter] = own[parameter]
            elif key in known:
                dtypes, values = known[key]
                found[parameter] = values | _rooms(parameter, dtypes, room)
        return found

    whole = sharding.meet("state_dict()", placed)
    device = sharding.wire.device_for("cpu")
    sharding.spread(
        [
            OwnedTensor(sharding.owner(key), flat(whole[parameter][name].detach()), device)
            for parameter, key in keys.items()
            if key in known
            for name in known[key][0]
        ]
    )
    return whole


def _described(state: Mapping[str, Any], parameter: torch.Tensor) -> Described:
    dtypes = {
        name: value.dtype
        for name, value in state.items()
        if torch.is_tensor(value) and value.shape == parameter.shape and value.ndim
    }
    values = {name: value for name, value in state.items() if name not in dtypes}
    return dtypes, {name: v.cpu() if torch.is_tensor(v) else v for name, v in values.items()}


def _rooms(
    parameter: torch.Tensor, dtypes: Mapping[str, torch.dtype], room: MappedStore
) -> dict[str, torch.Tensor]:
    sizes = [parameter.numel() * dtype.itemsize for dtype in dtypes.values()]
    flats = room.tensors(sizes) if sizes else []
    return {
        name: shaped_like(memory.view(dtype), parameter)
        for (name, dtype), memory in zip(dtypes.items(), flats, strict=True)
    }
