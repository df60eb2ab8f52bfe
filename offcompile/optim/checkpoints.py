"""Saves and loads `state_dict()`, wherever the states are."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.mapped import MappedStore
from offcompile.runtime.disk.directories import default_directory
from offcompile.runtime.states.states import MemoryStates

from .core import MASTER, Core, ParameterEntry
from .layout import flat_like, shaped_like
from .ranks.gathering import gathered
from .ranks.shards import is_sharded, local_state, sharded_like


def whole_state(core: Core) -> defaultdict[torch.Tensor, Any]:
    """The optimizer's state including states on disk, on tensors backed by a file. Where states are
    shared out over ranks, those of all: a collective."""
    if core.sharding is None:
        return own_state(core)
    own = core.sharding.meet("state_dict()", lambda: own_state(core))
    keys = {parameter: entry.key for parameter, entry in core.entries.items()}
    return gathered(core.sharding, keys, own, _room(core))


def own_state(core: Core) -> defaultdict[torch.Tensor, Any]:
    """The states that this rank has; those on disk on tensors backed by a file."""
    found: defaultdict[torch.Tensor, Any] = defaultdict(dict, core.state)
    room: MappedStore | None = None
    for parameter, entry in core.entries.items():
        if entry.store is None or isinstance(entry.store, MemoryStates):
            continue
        room = room or _room(core)
        found[parameter] = {**core.state[parameter], **_copied(core, entry, room)}
    return found


def _room(core: Core) -> MappedStore:
    return MappedStore((core.settings.directories or (default_directory(),))[0])


def elsewhere(core: Core, groups: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Number of a parameter in `state_dict()` → the rank, within the group, that has its states."""
    if core.sharding is None:
        return {}
    numbered = enumerate(p for group in groups for p in group["params"])
    owners = {n: core.sharding.owner(core.entries[p].key) for n, p in numbered}
    return {n: owner for n, owner in owners.items() if owner != core.sharding.wire.rank}


def refuse_others(
    core: Core, parameters: Mapping[Any, torch.Tensor], elsewhere: Mapping[Any, int]
) -> None:
    """Raise OffloadError if what is loaded lacks states that this rank has to have."""
    lacking = [n for n in elsewhere if n in parameters and core.owns(core.entries[parameters[n]])]
    if lacking:
        label = core.entries[parameters[lacking[0]]].label
        raise OffloadError(
            f"This is the local_state_dict() of one rank, and the states of {label} were on rank"
            f" {elsewhere[lacking[0]]}: load what this rank has saved, on as many ranks, or a"
            " state_dict()"
        )


def _copied(core: Core, entry: ParameterEntry, room: MappedStore) -> dict[str, torch.Tensor]:
    numel, dtypes = entry.local.numel(), entry.dtypes
    flats = [
        memory.view(dtype)
        for memory, dtype in zip(
            room.tensors([numel * d.itemsize for d in dtypes]), dtypes, strict=True
        )
    ]
    assert entry.store is not None
    for r in entry.store.visit(entry.key, write=False):
        for whole, part in zip(flats, r.parts, strict=True):
            whole[r.start : r.stop].copy_(part)
    kept = {}
    for name, whole in zip(entry.names, flats, strict=True):
        if name == "momentum_buffer" and entry.is_first:
            continue
        kept[name] = sharded_like(shaped_like(whole, entry.local), entry.parameter)
    return kept


def load(
    core: Core,
    state: defaultdict[torch.Tensor, Any],
    parameters: Mapping[Any, torch.Tensor],
    saved: Mapping[Any, Any],
) -> None:
    """Fill the empty `state` and the stores from a `state_dict`. `parameters`: by its keys."""
    core.state = state
    if core.sharding is not None:
        core.sharding.reset()
    for entry in core.entries.values():
        core.forget(entry)
    for key, values in saved.items():
        parameter = parameters.get(key)
        if parameter is None:
            state[key] = values
        elif not core.owns(core.entries[parameter]):
            state[parameter]  # makes an entry, as an update by another rank does
        elif values:
            _load_one(core, core.entries[parameter], values)


@torch.no_grad()
def _load_one(core: Core, entry: ParameterEntry, saved: Mapping[str, Any]) -> None:
    parameter = entry.parameter
    names = (MASTER, *core.rule.names(entry.group))
    core.start(entry)
    if entry.step is not None and "step" in saved:
        entry.step.fill_(float(saved["step"]))
    flats = {}
    for name in names:
        value = saved.get(name)
        if name not in entry.names or value is None:
            continue
        if value.shape != parameter.shape:
            raise OffloadError(
                f"{name} of {entry.label} has shape {tuple(value.shape)} in what is loaded, not"
                f" {tuple(parameter.shape)}: this checkpoint is of another model"
            )
        if is_sharded(value) and not is_sharded(parameter):
            raise OffloadError(
                f"{name} of {entry.label} is a DTensor in what is loaded, and the parameter is not"
                " sharded: load it with torch.distributed.checkpoint, or give its full_tensor()"
            )
        part = local_state(value.detach(), parameter)
        flats[name] = flat_like(part, entry.local)
    core.write(entry, flats)
    if MASTER in flats:
        entry.agreed = parameter._version
    if "momentum_buffer" in flats:
        entry.is_first = False
        core.show(entry)
    known = {*names, "step"}
    core.state[parameter].update({k: v for k, v in saved.items() if k not in known})
