"""Loads weights from files into a model, tensor by tensor, wherever its parameters are."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from offcompile.ir import OffloadError
from offcompile.runtime.disk.checkpoint_files import CheckpointEntry, entries

_SHOWN = 10


def load_weights(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """See `offcompile.load_weights`.

    tell: called with the bytes of the model that are filled, and the total to fill.
    """
    targets = model.state_dict(keep_vars=True)
    found = entries(path)
    wrong = _differences(targets, found, strict)
    if wrong:
        more = [f"… and {len(wrong) - _SHOWN} more"] if len(wrong) > _SHOWN else []
        raise OffloadError(
            "\n  ".join([f"nothing was loaded from {os.fspath(path)}:", *wrong[:_SHOWN], *more])
        )
    with torch.no_grad():
        done, total = 0, sum(targets[name].nbytes for name in found if name in targets)
        for name, entry in found.items():
            if name in targets:
                tell(done, total)
                entry.copy_to(targets[name])
                done += targets[name].nbytes


def _differences(
    targets: dict[str, Any], found: dict[str, CheckpointEntry], strict: bool
) -> list[str]:
    wrong = []
    filled = {_place(targets[k]) for k in found if isinstance(targets.get(k), torch.Tensor)}
    for name, target in targets.items():
        if not isinstance(target, torch.Tensor):
            wrong.append(f"{name} is extra state, no tensor: use model.load_state_dict")
        elif target.is_meta:
            wrong.append(
                f"{name} has no memory yet (device 'meta'): build the model within"
                " offcompile.host_init, or call model.to_empty(device=…) there"
            )
        elif name in found and tuple(target.shape) != found[name].shape:
            mine, theirs = tuple(target.shape), found[name].shape
            wrong.append(f"{name} is {theirs} in the file and {mine} in the model")
        elif name not in found and strict and _place(target) not in filled:
            wrong.append(f"{name} is not in the file (strict=False leaves it as it is)")
    if strict:
        unknown = [k for k in found if k not in targets]
        wrong += (f"{k} is not in the model (strict=False passes over it)" for k in unknown)
    return wrong


def _place(tensor: object) -> object:
    """A key that is equal for tied parameters and for equal views of one storage."""
    assert isinstance(tensor, torch.Tensor)
    if tensor.is_meta or not tensor.numel():
        return id(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
