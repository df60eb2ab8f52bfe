"""Chooses the store of each parameter's states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offcompile.runtime.base.limits import read_limits
from offcompile.runtime.disk.directories import default_directory
from offcompile.runtime.states import updates
from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.gradient_transport import runtime_on
from offcompile.runtime.states.states import HostStates, MemoryStates, States
from offcompile.runtime.states.streamed_states import StreamedStates

from .settings import Settings

KEPT, STREAMED = "device", "streamed"
#: share of the host states that stream to the device if no plan advises: at usual rates, the link
#: takes about as long for them as the host takes for the others
USUAL_SHARE = 0.5
#: smaller states stay on an asynchronous device, and are updated there in one call at the end of a
#: step: a copy or an update of their own would take longer to launch than to run
SMALL_BYTES = 256 << 10


class Places:
    """The stores of one optimizer, made when they are first needed.

    The device keeps states of the first parameters, as far as its limit allows, since their
    gradients come last and their updates have nothing to overlap with. "auto" fills the host up to
    its limit and puts the rest on disk, interleaved so that neither waits for the other. Beside an
    asynchronous device, the host updates the last parameters, whose gradients come first; states of
    the others stream to the device and back, unless a plan advises another split.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stores: dict[str, States] = {}
        self._host_bytes = self._device_bytes = 0
        self._bound_bytes = settings.host_bytes
        self._device_limit_bytes = settings.device_bytes

    def stores(self) -> dict[str, States]:
        """The stores by name: `host`, `disk`, `device cuda:0`, `streamed cuda:0`, …"""
        return dict(self._stores)

    def named(self, place: str) -> States:
        store = self._stores.get(place)
        if store is None:
            store = self._stores[place] = self._make(place)
        return store

    def choose(self, wanted: Iterable[tuple[torch.Tensor, int]]) -> dict[int, str]:
        """Choose places for (parameter, bytes of its states) pairs; returns position → place."""
        asked = list(wanted)
        found = dict.fromkeys(self._on_device([nbytes for _, nbytes in asked]), "device")
        others = [(i, nbytes) for i, (_, nbytes) in enumerate(asked) if i not in found]
        if self.settings.states == "auto":
            found |= dict.fromkeys((i for i, _ in others), "disk")
            found |= dict.fromkeys(self._on_host(others), "host")
        else:
            found |= dict.fromkeys((i for i, _ in others), self.settings.states)
        found |= self._streamed(asked, [i for i in sorted(found) if found[i] == "host"])
        return {i: _named(found[i], p.device) for i, (p, _) in enumerate(asked)}

    def choose_again(self, device_bytes: int) -> None:
        """Forget what was chosen. `device_bytes`: what the device may keep from now on."""
        self._host_bytes = self._device_bytes = 0
        self._device_limit_bytes = device_bytes

    def advised(self, parameter: torch.Tensor, nbytes: int, place: str) -> str:
        """The place for states about to be created: the chosen one, or the plan's advice."""
        kind = place.partition(" ")[0]
        by_device = updates.advice_for(parameter)
        if self.settings.stream is not None or by_device is None:
            return place
        if kind == STREAMED and not by_device:
            return _named("host", parameter.device)
        if kind in ("host", "memory") and by_device and nbytes > SMALL_BYTES:
            return _named(STREAMED, parameter.device)
        return place

    def buffer_bytes(self, place: str, largest_bytes: int) -> int:
        """Device memory for streaming states, of which a parameter has at most `largest_bytes`."""
        store = self.named(place)
        assert isinstance(store, StreamedStates)
        return store.held_bytes(largest_bytes)

    def _streamed(
        self, asked: Sequence[tuple[torch.Tensor, int]], hosted: Sequence[int]
    ) -> dict[int, str]:
        """Choose the first hosted parameters for updates on the device; it keeps small states."""
        share = self.settings.stream
        if share is None:
            hosted = [i for i in hosted if asked[i][0].device.type != "cpu"]
            share = USUAL_SHARE
        if not share:
            return {}
        found = {i: KEPT for i in hosted if 0 < asked[i][1] <= SMALL_BYTES}
        large = [i for i in hosted if asked[i][1] > SMALL_BYTES]
        left_bytes = share * sum(asked[i][1] for i in large)
        for i in large:
            nbytes = asked[i][1]
            if left_bytes < nbytes / 2:
                break
            left_bytes -= nbytes
            found[i] = STREAMED
        return found

    def _on_device(self, sizes: Sequence[int]) -> list[int]:
        chosen = []
        for i, nbytes in enumerate(sizes):
            if self._device_bytes + nbytes > self._device_limit_bytes:
                break
            self._device_bytes += nbytes
            chosen.append(i)
        return chosen

    def _on_host(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Choose as many parameters as the host has room for, evenly spread."""
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
        device = device_in(place)
        if device is not None and is_streamed(place):
            return StreamedStates(runtime_on(torch.device(device)).device)
        if device is not None:
            return MemoryStates(
                lambda nbytes: torch.zeros(nbytes, dtype=torch.uint8, device=device)
            )
        if place == "memory":
            return HostStates(None)
        directories = self.settings.directories or (default_directory(),)
        if place == "host":
            return HostStates(directories[0])
        keeps = self.settings.states == "disk"  # otherwise host states already use the limit
        host_bytes = (self._bound_bytes or 0) if keeps else 0
        return DiskStates(directories, host_bytes, verify=self.settings.verify_spill)

    def close(self) -> None:
        for store in self._stores.values():
            store.close()
        self._stores.clear()


def device_in(place: str | None) -> str | None:
    """The device that updates states at this place; None: the host."""
    kind, _, device = (place or "").partition(" ")
    return device if kind in (KEPT, STREAMED) else None


def kept_on(device: torch.device) -> str:
    """The place of states that this device keeps."""
    return _named(KEPT, device)


def is_kept_there(place: str | None) -> bool:
    """True if the states stay on the device."""
    return (place or "").startswith(KEPT)


def is_streamed(place: str | None) -> bool:
    """True if the states live on the host and stream to the device for each update."""
    return (place or "").startswith(STREAMED)


def _named(place: str, device: torch.device) -> str:
    if place in (KEPT, STREAMED):
        return f"{place} {device}"
    # plain process memory is fine beside a device, but counts against the budget on the CPU
    return "memory" if place == "host" and device.type != "cpu" else place


def _free_half() -> int:
    limits = read_limits()
    free_bytes = limits.available_bytes
    if free_bytes is None:
        free_bytes = limits.memory_bytes
    return min(free_bytes, limits.memory_bytes) // 2
