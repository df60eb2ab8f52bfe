"""Where an optimizer's states lie, as flat ranges that an update can go through one by one.

On memory a parameter's states are one range; a store on disk hands out blocks. Whoever updates
writes no other code for the one than for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.mapped import MappedStore

#: parts begin at multiples of so many bytes; ranges at multiples of so many elements
ALIGN_BYTES = 64
ALIGN_ELEMENTS = 16

Room = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Range:
    """Elements [start, stop) of a parameter: a flat view of each of its states.

    `start` is a multiple of ALIGN_ELEMENTS, and so is `stop` unless it is the end.
    """

    start: int
    stop: int
    parts: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class StatesFacts:
    """What a store holds now, and what it has moved since it was made."""

    host_bytes: int = 0
    disk_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class States(Protocol):
    """Flat states of parameters, which are known by numbers."""

    def add(self, key: int, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        """Keep one tensor of zeros for each of `dtypes`."""

    def remove(self, key: int) -> None:
        """Forget the states of `key`."""

    def visit(self, key: int, write: bool = True) -> Iterator[Range]:
        """All states of `key`, front to back.

        What the caller writes to a range's parts is kept, if `write`, once it asks for the next
        range or closes the iterator; the parts are not to be used after that.
        """

    def expect(self, keys: Sequence[int]) -> None:
        """The order in which visits will come, again and again."""

    def settle(self) -> None:
        """Return when everything is written; raises what failed."""

    def facts(self) -> StatesFacts: ...

    def close(self) -> None:
        """Give everything back."""


class MemoryStates:
    """States in memory that `room` makes: flat uint8 tensors, all zero.

    `tensors` gives the states themselves, for good: what `visit` hands out are views of them.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._parts: dict[int, tuple[torch.Tensor, ...]] = {}
        self._nbytes: dict[int, int] = {}

    def add(self, key: int, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        if key in self._parts:
            raise OffloadError(f"Optimizer states number {key} are there already: remove them.")
        starts, end = [], 0
        for dtype in dtypes:
            starts.append(end)
            end += -(-numel * dtype.itemsize // ALIGN_BYTES) * ALIGN_BYTES
        flat = self._room(end)
        self._nbytes[key] = end
        self._parts[key] = tuple(
            _part(flat, start, numel * dtype.itemsize).view(dtype)
            for start, dtype in zip(starts, dtypes, strict=True)
        )

    def tensors(self, key: int) -> tuple[torch.Tensor, ...]:
        """One flat tensor for each dtype that was asked for."""
        return self._parts[key]

    def remove(self, key: int) -> None:
        del self._parts[key], self._nbytes[key]

    def visit(self, key: int, write: bool = True) -> Iterator[Range]:
        parts = self._parts[key]
        yield Range(0, parts[0].numel() if parts else 0, parts)

    def expect(self, keys: Sequence[int]) -> None:
        """Nothing: all of it is at hand."""

    def settle(self) -> None:
        """Nothing: what was written is there."""

    def facts(self) -> StatesFacts:
        return StatesFacts(host_bytes=sum(self._nbytes.values()))

    def close(self) -> None:
        self._parts.clear()
        self._nbytes.clear()


class HostStates(MemoryStates):
    """States on the host tier.

    directory: they lie in unlinked files there, mapped, so that the system and not the process
    holds them; None: in the process's own memory (where host memory is no budget, beside a GPU).
    """

    def __init__(self, directory: Path | None) -> None:
        super().__init__(_zeros if directory is None else _MappedRoom(directory))


class _MappedRoom:
    def __init__(self, directory: Path) -> None:
        self._store = MappedStore(directory)

    def __call__(self, nbytes: int) -> torch.Tensor:
        (flat,) = self._store.tensors([nbytes])
        slot = self._store.slot_of(flat)
        if slot is None or not slot.clear_absent():
            flat.zero_()
        return flat


def _part(flat: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Part of the memory, with a storage of its own: one of several types cannot be saved."""
    if flat.device.type != "cpu" or not nbytes:
        return flat[start : start + nbytes].clone()
    return torch.from_numpy(flat.numpy()[start : start + nbytes])


def _zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)
