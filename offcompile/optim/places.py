"""Which store a parameter's states go to."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offcompile.runtime.directories import default_directory
from offcompile.runtime.disk_states import DiskStates
from offcompile.runtime.limits import read_limits
from offcompile.runtime.states import HostStates, MemoryStates, States

from .settings import Settings


class Places:
    """The stores of one optimizer, made when they are first needed.

    "auto": the host, as long as all that is known by then fits what states may take there; else
    disk, with so much of it kept in memory.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stores: dict[str, States] = {}
        self._host_bytes = 0
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
        if self.settings.states == "device":
            return {i: f"device {p.device}" for i, (p, _) in enumerate(asked)}
        place = "disk" if self.settings.states == "disk" else "host"
        total_bytes = sum(nbytes for _, nbytes in asked)
        if self.settings.states == "auto":
            if self._bound_bytes is None:
                self._bound_bytes = _free_half()
            if self._host_bytes + total_bytes > self._bound_bytes:
                place = "disk"
        if place == "host":
            self._host_bytes += total_bytes
        # the process's own memory is what counts where it computes, but not beside a device
        return {
            i: "memory" if place == "host" and p.device.type != "cpu" else place
            for i, (p, _) in enumerate(asked)
        }

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
        kept_bytes = max(0, (self._bound_bytes or 0) - self._host_bytes)
        return DiskStates(directories, kept_bytes)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()


def _free_half() -> int:
    limits = read_limits()
    free_bytes = limits.available_bytes
    if free_bytes is None:
        free_bytes = limits.memory_bytes
    return min(free_bytes, limits.memory_bytes) // 2
