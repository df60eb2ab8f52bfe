"""Gives back each result of a captured half after a replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from offcompile.runtime.device import tickets
from offcompile.runtime.device.graphs import CannotCapture
from offcompile.runtime.moves.saved import Saved

from .places import Geometry, Lent, StaticPlace, lent


@dataclass(frozen=True)
class OfArgument:
    """A result that lies in an argument's storage, such as a weight that is saved for backward."""

    index: int
    geometry: Geometry

    def of(self, x: torch.Tensor) -> torch.Tensor:
        g = self.geometry
        if (x.dtype, tuple(x.shape), tuple(x.stride()), x.storage_offset()) == (
            g.dtype,
            g.size,
            g.stride,
            g.offset,
        ):
            return x
        flat = torch.empty(0, dtype=torch.uint8, device=x.device)
        storage = x.untyped_storage()
        return g.within(flat.set_(storage, 0, (storage.nbytes(),), (1,)))


@dataclass(eq=False)
class Results:
    """The results of one half, as its graph makes them.

    users: how many of the first ones are the user's, who gets copies: they may outlive the step.
    """

    users: int
    #: for each result: its place in the graph's memory, the argument that it lies in, or itself
    ways: list[Any] = field(default_factory=list)
    _lent: dict[int, Lent] = field(default_factory=dict)

    @classmethod
    def of(
        cls, outputs: Sequence[Any], device: torch.device, where: Mapping[int, int], users: int
    ) -> Results:
        """`where`: storage → the argument that it belongs to. Raises CannotCapture."""
        made = cls(users)
        made.ways = [_way(i, x, device, where) for i, x in enumerate(outputs)]
        return made

    def lend(self, owner: object, on_host: Sequence[torch.Tensor] = ()) -> None:
        """Lend the results of later replays, in memory that `owner` keeps, or that they keep
        themselves if it is `on_host`."""
        at = [i for i, way in enumerate(self.ways) if isinstance(way, StaticPlace)]
        owners = {flat.data_ptr(): flat for flat in on_host}
        found = lent([self.ways[i] for i in at], owner, owners)
        self._lent = dict(zip(at, found, strict=True))

    def given(self, arguments: Sequence[Any], outputs: Sequence[Any] | None = None) -> list[Any]:
        """The results of a replay. `outputs`: those captured, before anything is lent."""
        return [self._given(i, way, arguments, outputs) for i, way in enumerate(self.ways)]

    def _given(
        self, i: int, way: Any, arguments: Sequence[Any], outputs: Sequence[Any] | None
    ) -> Any:
        if isinstance(way, StaticPlace):
            found = self._lent[i].give() if outputs is None else outputs[i]
            return found.clone() if i < self.users else found
        if isinstance(way, OfArgument):
            found = way.of(arguments[way.index])
            return found.clone() if i < self.users else found
        return way

    @property
    def copied_bytes(self) -> int:
        mine = self.ways[: self.users]
        return sum(way.nbytes for way in mine if isinstance(way, StaticPlace))

    def _saved(self) -> list[StaticPlace]:
        return [way for way in self.ways[self.users :] if isinstance(way, StaticPlace)]

    @property
    def storages(self) -> frozenset[int]:
        """Addresses of the saved results' storages in the pool."""
        return frozenset(way.address for way in self._saved())

    @property
    def saved_bytes(self) -> int:
        return sum({way.address: way.nbytes for way in self._saved()}.values())

    def saved_in_pool(self, outputs: Sequence[Any]) -> list[torch.Tensor]:
        """Those of the captured outputs that are saved and are no arguments; tickets too."""
        found = list(zip(self.ways, outputs, strict=True))[self.users :]
        return [
            x for way, x in found if isinstance(x, torch.Tensor) and not isinstance(way, OfArgument)
        ]

    def out(self) -> list[Lent]:
        """Results of the last replay that others than the graph still hold."""
        return [one for i, one in self._lent.items() if i >= self.users and not one.is_back]


def _way(i: int, x: Any, device: torch.device, where: Mapping[int, int]) -> Any:
    if not isinstance(x, torch.Tensor) or tickets.peek(x, Saved) is not None:
        return x
    if x.device.type != device.type:
        raise CannotCapture(
            f"result {i}, of shape {tuple(x.shape)}, is made on {x.device}; compute it on {device},"
            " or outside of the compiled model"
        )
    index = where.get(x.untyped_storage().data_ptr())
    return StaticPlace.of(x) if index is None else OfArgument(index, Geometry.of(x))
