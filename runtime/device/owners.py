"""Decides which parameters may be given other memory, and names who else uses their memory.

A parameter leaves the device when its `.data` is given memory on the host. Other holders keep the
old memory: a view taken before, the flat buffer that a framework gathers weights into (FSDP2),
another process. They would go on reading and writing memory that the parameter no longer has. So a
parameter leaves only if its tensor is the only one on its storage, which torch counts.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from types import FrameType, ModuleType
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

#: holders named for one parameter
NAMED = 2
#: the reason that `name_holders` can explain further
SHARED = "other tensors lie on its memory"
#: looks at all objects for what refers to a holder: directly, then through one container more each
LOOKS = 4
_CONTAINERS = (dict, list, tuple, set)
_ORDINARY = (torch.Tensor, torch.nn.Parameter)


def address_of(tensor: torch.Tensor) -> int | None:
    """Return the address of the tensor's storage.

    None for tensors without plain memory (wrapper subclasses, fake and sparse tensors).
    """
    if type(tensor) not in _ORDINARY and (is_traceable_wrapper_subclass(tensor) or is_fake(tensor)):
        return None
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # torch raises this for a tensor that has no data pointer
        return None


def plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that make up a tensor: itself, unless it is a wrapper."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = [getattr(tensor, name) for name in names]
        # since torch 2.13 a DTensor also names its mesh here
        return [part for x in inner if isinstance(x, torch.Tensor) for part in plain_parts(x)]
    return [tensor]


def device_bytes(tensor: torch.Tensor) -> int:
    """Return the total bytes of all storages behind a tensor of any kind."""
    total = 0
    for part in plain_parts(tensor):
        if part.layout is torch.strided:
            total += part.untyped_storage().nbytes()
        elif part.layout is torch.sparse_coo:
            total += part._values().nbytes + part._indices().nbytes
        else:
            total += part.values().nbytes
    return total


def why_it_stays(parameter: torch.Tensor) -> str | None:
    """Return the reason that a parameter's memory must not be replaced; None if it may be."""
    kind = type(parameter).__name__
    if is_traceable_wrapper_subclass(parameter):
        return f"a {kind} is made of other tensors and has no memory of its own"
    if address_of(parameter) is None or is_fake(parameter) or parameter.is_meta:
        return f"a {kind} ({parameter.layout}, {parameter.device}) has no plain memory"
    # CUDA tensors always report that they are shared
    if parameter.device.type == "cpu" and parameter.untyped_storage().is_shared():
        return "it lies in memory that processes share"
    if has_others(parameter):
        return SHARED
    return None


def has_others(tensor: torch.Tensor) -> bool:
    """True if anything but this tensor holds its storage: another tensor, a storage object."""
    return _holders(tensor) > _holders_of_one()


def _holders(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    # each tensor on the storage counts, and so does each reference to the storage's Python object
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


@cache
def _holders_of_one() -> int:
    """The count for an unshared tensor; torch may change how it counts the storage object."""
    return _holders(torch.empty(1, device="cpu"))


def name_holders(parameters: Sequence[torch.Tensor]) -> list[str]:
    """Name, for each parameter, the other holders of its memory, by type and by referrer.

    Scans every object of the process: for error messages only.
    """
    tensors: dict[int, list[torch.Tensor]] = {_key(p): [] for p in parameters}
    mine = {id(p) for p in parameters}
    # subclasses may override these queries, and some raise
    with torch._C.DisableTorchFunctionSubclass():
        for found in gc.get_objects():
            # a proxy's `__class__` may lie, and reading it may run its code
            if issubclass(type(found), torch.Tensor) and id(found) not in mine:
                tensors.get(_key(found), []).append(found)
    others = [other for some in tensors.values() for other in some]
    referrers = _Referrers(others, [tensors, *tensors.values(), others])
    return [_named(tensors.get(_key(p), []), referrers) for p in parameters]


def _key(tensor: torch.Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except RuntimeError:  # as above
        return -1


def _named(others: Iterable[torch.Tensor], referrers: _Referrers) -> str:
    said = dict.fromkeys(_described(other, referrers) for other in others)
    if not said:
        return "something that is no Python object"
    more = f" and {len(said) - NAMED} more" if len(said) > NAMED else ""
    return ", ".join(list(said)[:NAMED]) + more


def _described(tensor: torch.Tensor, referrers: _Referrers) -> str:
    owner = referrers.owner_of(tensor, frozenset([id(tensor)]))
    if owner is not None:
        return f"a {type(tensor).__name__} held by {owner}"
    return f"a {type(tensor).__name__} in a variable, or saved for a backward pass"


class _Referrers:
    """Finds the objects that refer to some others, directly or through containers.

    Each look at all objects of the process takes a good part of a second, so one is made for all
    objects at once, and one for all containers found by it.
    """

    def __init__(self, held: list[torch.Tensor], skipped: Iterable[object]) -> None:
        #: by id of what is referred to
        self._found: dict[int, list[object]] = {}
        # all that this search makes lives until its end, so that no other object gets such an id
        self._made: list[object] = [self._found, *skipped]
        self._skipped = {id(self._made), *map(id, self._made)}
        level: list[Any] = held
        for _ in range(LOOKS):
            if level:
                level = self._containers_around(level)

    def owner_of(self, held: object, passed: frozenset[int]) -> str | None:
        """Name the object that refers to `held`, through its attributes and containers."""
        for referrer in self._found.get(id(held), ()):
            if id(referrer) in passed:
                continue
            if not issubclass(type(referrer), _CONTAINERS):
                kind = type(referrer)
                return f"{kind.__module__}.{kind.__qualname__}"
            if _is_of_module(referrer):
                return f"the module {referrer['__name__']}"  # type: ignore[index]
            found = self.owner_of(referrer, passed | {id(referrer)})
            if found is not None:
                return found
        return None

    def _containers_around(self, level: list[Any]) -> list[Any]:
        """Note what refers to the objects of a level; return the containers among it."""
        around: list[Any] = []
        for held in level:
            self._found[id(held)] = self._ours([])
        for referrer in self._ours(gc.get_referrers(*level)):
            kind = type(referrer)
            if id(referrer) in self._skipped or issubclass(kind, FrameType | ModuleType):
                continue
            if kind.__name__.endswith(("iterator", "generator")):
                continue
            for key in {id(x) for x in gc.get_referents(referrer)} & self._found.keys():
                self._found[key].append(referrer)
            if issubclass(kind, _CONTAINERS) and not _is_of_module(referrer):
                around.append(referrer)
        return self._ours([x for x in around if id(x) not in self._found])

    def _ours(self, made: list[Any]) -> list[Any]:
        self._made.append(made)
        self._skipped.add(id(made))
        return made


def _is_of_module(container: Any) -> bool:
    return issubclass(type(container), dict) and "__name__" in container
