"""Says what optimizers other than ours hold on a device, which no plan counts.

Their states come with their first step, so they are looked at in the second call of a graph.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from offcompile.runtime.base.once import first_time, made_once

_STEPPED = "optimizers that have made a step"


def _stepped() -> weakref.WeakSet[torch.optim.Optimizer]:
    return made_once(_STEPPED, None, weakref.WeakSet)


def watch_steps() -> None:
    """Note, from now on, which optimizers make steps."""
    if first_time(_STEPPED, "watched"):
        register_optimizer_step_post_hook(_note)


def _note(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if not type(optimizer).__module__.startswith("offcompile."):  # ours say what they hold
        _stepped().add(optimizer)


def states_beside(parameters: Collection[torch.Tensor]) -> Counter[str]:
    """Optimizer's class → bytes of its states on the device of these parameters."""
    wanted, found = {id(p): p.device for p in parameters}, Counter[str]()
    for optimizer in tuple(_stepped()):
        for parameter, states in optimizer.state.items():
            device = wanted.get(id(parameter))
            if device is None or not isinstance(states, dict):
                continue
            found[type(optimizer).__name__] += sum(
                value.untyped_storage().nbytes()
                for value in states.values()
                if isinstance(value, torch.Tensor) and value.device == device
            )
    return +found
