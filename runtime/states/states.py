"""Storage of an optimizer's states, as flat ranges that an update visits one by one.

In memory, a parameter's states are one range; a store on disk yields blocks. The same update code
works for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device.mapped import MappedStore

#: parts begin at multiples of this many bytes; ranges at multiples of this many elements
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
    """Bytes that a store holds now, and bytes moved since it was created."""

    host_bytes: int = 0
    disk_bytes: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class States(Protocol):
    """Flat states of parameters, which are identified by numbers."""

    def add(self, key: int, numel: int, dtypes: Sequence[torch.dtype]) -> None:
        """Add one tensor of zeros for each of `dtypes`."""

    def remove(self, key: int) -> None:
        """Forget the states of `key`."""

    def visit(self, key: int, write: bool = True) -> Iterator[Range]:
        """Yield all states of `key`, front to back.

        If `write`, the caller's writes to a range's parts are kept once it asks for the next range
        or closes the iterator; the parts must not be used after that.
        """

    def expect(self, keys: Sequence[int]) -> None:
        """Set the order of visits, which repeats."""

    def settle(self) -> None:
        """Return when everything is written; raises write failures."""

    def facts(self) -> StatesFacts: ...

    def close(self) -> None:
        """Release everything."""


class MemoryStates:
    """States in memory from `room`, which returns flat uint8 zeros.

    `tensors` returns the states themselves, permanently: the ranges that `visit` yields are views
    of them.
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
        """One flat tensor for each dtype passed to `add`."""
        return self._parts[key]

    def remove(self, key: int) -> None:
        del self._parts[key], self._nbytes[key]

    def visit(self, key: int, write: bool = True) -> Iterator[Range]:
        parts = self._parts[key]
        yield Range(0, parts[0].numel() if parts else 0, parts)

    def expect(self, keys: Sequence[int]) -> None:
        """Does nothing: all states are in memory."""

    def settle(self) -> None:
        """Does nothing: writes take effect at once."""

    def facts(self) -> StatesFacts:
        return StatesFacts(host_bytes=sum(self._nbytes.values()))

    def close(self) -> None:
        self._parts.clear()
        self._nbytes.clear()


class HostStates(MemoryStates):
    """States on the host tier.

    directory: the states are in mapped, unlinked files there, so that the system holds them, not
    the process; None: in the process's own memory (beside a GPU, where host memory is not the
    budget).
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
    """A part of the memory, with its own storage: torch cannot save one of several dtypes."""
    if flat.device.type != "cpu" or not nbytes:
        return flat[start : start + nbytes].clone()
    return torch.from_numpy(flat.numpy()[start : start + nbytes])


def _zeros(nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)
