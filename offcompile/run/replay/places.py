"""Static memory: where captured graphs find their arguments, and what they lend as results.

A graph reads and writes fixed addresses, and its next replay may write anywhere in its pool, and to
the host memory that it holds. So results are lent. Nothing is replayed while somebody who could
tell still holds one. Each lent result keeps the pool alive, or its own piece of host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from offcompile.runtime.device import tickets
from offcompile.runtime.device.graphs import CannotCapture
from offcompile.runtime.memory.alias import alias_bytes
from offcompile.runtime.moves.saved import Saved

_NONE: Mapping[int, object] = MappingProxyType({})


@dataclass(frozen=True)
class Geometry:
    """The form of a tensor, and where it begins in its storage."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    #: in elements
    offset: int

    @classmethod
    def of(cls, x: torch.Tensor) -> Geometry:
        return cls(x.dtype, tuple(x.size()), tuple(x.stride()), int(x.storage_offset()))

    def within(self, flat: torch.Tensor) -> torch.Tensor:
        """The tensor in a storage, given as flat uint8."""
        bare = torch.empty(0, dtype=self.dtype, device=flat.device)
        return bare.set_(flat.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(frozen=True)
class StaticPlace:
    """Where a tensor lies in memory that nobody owns and kernels can use."""

    address: int
    nbytes: int
    geometry: Geometry
    device: torch.device

    @classmethod
    def of(cls, x: torch.Tensor) -> StaticPlace:
        storage = x.untyped_storage()
        return cls(storage.data_ptr(), storage.nbytes(), Geometry.of(x), x.device)

    def alias(self, owner: object) -> torch.Tensor:
        """A tensor on that memory; its storage keeps `owner`."""
        geometry = self.geometry
        if not self.nbytes:
            return torch.empty_strided(
                geometry.size, geometry.stride, dtype=geometry.dtype, device=self.device
            )
        flat = alias_bytes(owner, self.address, self.nbytes, self.device)
        return geometry.within(flat)


class Lent:
    """A tensor in static memory that is lent at each replay."""

    __slots__ = ("_count", "_storage", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self._storage = tensor.untyped_storage()
        self._count = 0

    def count(self) -> None:
        """Note how many tensors lie there now: ours."""
        self._count = self._users()

    def _users(self) -> int:
        # torch's own CUDA graph trees ask for the same count
        count: int = torch._C._storage_Use_Count(self._storage._cdata)
        return count

    def give(self) -> torch.Tensor:
        return self.tensor.detach()

    @property
    def is_back(self) -> bool:
        """True if nobody else has a tensor on this storage."""
        return self._users() == self._count

    def is_in(self, x: torch.Tensor | None) -> bool:
        """True if `x` lies in this storage."""
        return x is not None and x.untyped_storage().data_ptr() == self._storage.data_ptr()


def lent(
    places: Sequence[StaticPlace], owner: object, owners: Mapping[int, object] = _NONE
) -> list[Lent]:
    """Lendable tensors in the memory of `owner`, a graph, or of the owner that `owners` has for an
    address; those of one storage share it."""
    first: dict[int, torch.Tensor] = {}
    made: list[torch.Tensor] = []
    for place in places:
        known = first.get(place.address) if place.nbytes else None
        if known is None:
            known = first[place.address] = place.alias(owners.get(place.address, owner))
            made.append(known)
        else:
            made.append(place.geometry.within(known))
    found = [Lent(x) for x in made]
    for one in found:
        one.count()
    return found


class Arguments:
    """Where one half finds its arguments: by address, or in a static copy.

    where: storages of arguments that are neither copies nor in the pool (`pooled`), by address.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        device: torch.device,
        copied: frozenset[int],
        pooled: frozenset[int] = frozenset(),
    ) -> None:
        self.static: dict[int, torch.Tensor] = {}
        self.where: dict[int, int] = {}
        self._fixed: list[tuple[int, int]] = []
        for i, x in enumerate(arguments):
            if not isinstance(x, torch.Tensor):
                raise CannotCapture(
                    f"argument {i} is a {type(x).__name__} and no tensor; compile with"
                    " dynamic=False, and pass numbers that change as tensors"
                )
            if x.device.type != device.type and tickets.peek(x, Saved) is None:
                raise CannotCapture(
                    f"argument {i}, of shape {tuple(x.shape)}, lies on {x.device}; move it to"
                    f" {device} before the call"
                )
            if i in copied:
                self.static[i] = _static_copy(i, x)
            else:
                self._fixed.append((i, x.data_ptr()))
                storage = x.untyped_storage().data_ptr()
                if x.numel() and storage not in pooled:
                    self.where[storage] = i
        self.nbytes = sum(x.untyped_storage().nbytes() for x in self.static.values())

    def strays(self, arguments: Sequence[Any]) -> list[int]:
        """Indices of arguments that have another address than when the graph was captured."""
        return [i for i, address in self._fixed if arguments[i].data_ptr() != address]

    def fill(self, arguments: Sequence[Any]) -> None:
        for i, static in self.static.items():
            static.copy_(arguments[i], non_blocking=True)

    def put_in(self, arguments: Sequence[Any]) -> list[Any]:
        """The arguments to capture with."""
        return [self.static.get(i, x) for i, x in enumerate(arguments)]


def _static_copy(i: int, x: torch.Tensor) -> torch.Tensor:
    if any(n > 1 and step == 0 for n, step in zip(x.shape, x.stride(), strict=True)):
        raise CannotCapture(
            f"argument {i}, of shape {tuple(x.shape)} and stride {x.stride()}, overlaps itself;"
            " pass it as contiguous()"
        )
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
