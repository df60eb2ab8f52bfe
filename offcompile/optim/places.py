"""Which store a parameter's states go to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offcompile.runtime.directories import default_directory
from offcompile.runtime.disk_states import DiskStates
from offcompile.runtime.limits import read_limits
from offcompile.runtime.states import HostStates, MemoryStates, States

from .settings import Settings


class Places:
    """The stores of one optimizer, made when they are first needed.

    The device gets what it may have of the first parameters, since their gradients come last and
    have nothing to hide behind. "auto": the host, as far as states may take room there, and disk
    for the others, in turn, so that neither has to wait for the other.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stores: dict[str, States] = {}
        self._host_bytes = self._device_bytes = 0
        self._bound_bytes = settings.host_bytes

    def stores(self) -> dict[str, States]:
        """By name: `host`, `disk`, `device cuda:0`, …"""
        return dict(self._stores)

    def named(self, place: str) -> States:
        store = self._stores.get(place)
        if store is None:
            store = self._stores[place] = self._make(place)
        return store

    def choose(self, wanted: Iterable[tuple[torch.Tensor, int]]) -> dict[int, str]:
        """The place for each of these parameters, whose states have so many bytes, by position."""
        asked = list(wanted)
        found = dict.fromkeys(self._on_device([nbytes for _, nbytes in asked]), "device")
        others = [(i, nbytes) for i, (_, nbytes) in enumerate(asked) if i not in found]
        if self.settings.states == "auto":
            found |= dict.fromkeys((i for i, _ in others), "disk")
            found |= dict.fromkeys(self._on_host(others), "host")
        else:
            found |= dict.fromkeys((i for i, _ in others), self.settings.states)
        return {i: _named(found[i], p.device) for i, (p, _) in enumerate(asked)}

    def _on_device(self, sizes: Sequence[int]) -> list[int]:
        chosen = []
        for i, nbytes in enumerate(sizes):
            if self._device_bytes + nbytes > self.settings.device_bytes:
                break
            self._device_bytes += nbytes
            chosen.append(i)
        return chosen

    def _on_host(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """As many as there is room for, evenly spread."""
        if self._bound_bytes is None:
            self._bound_bytes = _free_half()
        total_bytes = sum(nbytes for _, nbytes in sizes)
        share = (self._bound_bytes - self._host_bytes) / max(1, total_bytes)
        owed, chosen = 0.0, []
        for i, nbytes in sizes:
            owed += share * nbytes
            if owed >= nbytes and self._host_bytes + nbytes <= self._bound_bytes:
                owed -= nbytes
                self._host_bytes += nbytes
                chosen.append(i)
        return chosen

    def _make(self, place: str) -> States:
        if place.startswith("device "):
            device = place.removeprefix("device ")
            return MemoryStates(
                lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device)
            )
        if place == "memory":
            return HostStates(None)
        directories = self.settings.directories or (default_directory(),)
        if place == "host":
            return HostStates(directories[0])
        keeps = self.settings.states == "disk"  # otherwise the host has had what it may have
        host_bytes = (self._bound_bytes or 0) if keeps else 0
        return DiskStates(directories, host_bytes, verify=self.settings.verify_spill)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()


def _named(place: str, device: torch.device) -> str:
    if place == "device":
        return f"device {device}"
    # the process's own memory is what counts where it computes, but not beside a device
    return "memory" if place == "host" and device.type != "cpu" else place


def _free_half() -> int:
    limits = read_limits()
    free_bytes = limits.available_bytes
    if free_bytes is None:
        free_bytes = limits.memory_bytes
    return min(free_bytes, limits.memory_bytes) // 2
