"""One runtime for each set of settings in a process, found by a key that graphs can carry."""

from __future__ import annotations

import atexit
import json
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offcompile.ir import OffloadError
from offcompile.runtime.base import watchdog
from offcompile.runtime.base.counters import add_gauges, forget_parent
from offcompile.runtime.device.cpu import CpuDevice
from offcompile.runtime.device.interface import Device
from offcompile.runtime.device.lane_rates import Moved
from offcompile.runtime.device.mapped import MappedStore
from offcompile.runtime.disk.checksums import VerifiedStore
from offcompile.runtime.disk.directories import default_directory
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.accelerators import accelerator, accelerators, device_module
from offcompile.runtime.memory.arena import Arena
from offcompile.runtime.memory.malloc.heap import heap

from .mover import Mover

if TYPE_CHECKING:
    from offcompile.runtime.memory.host_arena import HostArena

#: on CUDA: pinned staging memory of each lane between the device and a disk
DISK_LANES, STAGING_BYTES = 2, 16 << 20
Made = TypeVar("Made")
TARGETS = ("cpu", "cuda:0, cuda:1, …")
_TARGET = re.compile(r"cpu|(\w+):\d+")


@dataclass(frozen=True)
class RuntimeSettings:
    """The settings of a runtime. Models with equal settings share one runtime.

    target: `cpu`, or one device of CUDA or of an accelerator that was added. On the CPU both tiers
    are files; elsewhere the host tier is pinned memory, and there is a disk tier if directories are
    named.
    directories: where spill files go; if empty, the CPU target uses the system's temporary
    directory.
    host_bytes, disk_bytes: capacity of each tier; None: no bound, 0: no such tier.
    arena_bytes: memory allocated at the start (the arena grows if it needs more).
    in_flight_bytes: bound on the device memory that moves hold; None: no bound.
    verify_spill: verify checksums of reads from spill files (`checksums`).
    """

    target: str = "cpu"
    directories: tuple[str, ...] = ()
    host_bytes: int | None = None
    disk_bytes: int | None = None
    arena_bytes: int = 0
    chunk_bytes: int = 8 << 20
    in_flight_bytes: int | None = None
    verify_spill: bool = False

    def __post_init__(self) -> None:
        named = _TARGET.fullmatch(self.target)
        if named is None or named[1] not in (None, "cuda", *accelerators()):
            raise OffloadError(
                f"There is no runtime for the target {self.target!r}: choose one of {TARGETS}."
            )
        object.__setattr__(self, "directories", tuple(os.fspath(d) for d in self.directories))
        for name in ("host_bytes", "disk_bytes", "arena_bytes", "in_flight_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise OffloadError(f"{name} is {value}: it must not be negative.")
        if self.host_bytes == 0 and self.disk_bytes == 0:
            raise OffloadError("host_bytes and disk_bytes are both 0: nothing could move anywhere.")

    @cached_property
    def key(self) -> str:
        """The settings as canonical JSON: equal settings have equal keys."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_key(cls, key: str) -> RuntimeSettings:
        try:
            found = json.loads(key)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise OffloadError(f"{key!r} is not the key of a runtime (JSON of its settings).")
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(found) - known):
            raise OffloadError(f"The runtime key has unknown settings: {', '.join(unknown)}.")
        found["directories"] = tuple(found.get("directories", ()))
        return cls(**found)


class Runtime:
    """Arena, spill files, lanes and mover of one set of settings; open until closed."""

    def __init__(self, settings: RuntimeSettings) -> None:
        watchdog.limit_s()  # raise a bad setting now, not in the middle of a wait
        self.settings = settings
        self.stores: dict[str, SpillStore] = {}
        #: pinned memory on CUDA, staging on the CPU
        self.arena: Arena | HostArena
        self.device: Device
        try:
            if settings.target == "cpu":
                self._on_cpu()
            else:
                self._on_card()
        except BaseException:
            self._close_stores()
            raise
        self.mover = Mover(self.device, settings.in_flight_bytes)
        self._companions: dict[object, Any] = {}
        self._forget_gauges = add_gauges(self._gauges)

    def _on_cpu(self) -> None:
        settings = self.settings
        self._open_stores({"host": settings.host_bytes, "disk": settings.disk_bytes})
        self.arena = Arena(settings.arena_bytes)
        self.device = CpuDevice(
            self.arena, self.stores, settings.chunk_bytes, MappedStore(self._directories[0])
        )

    def _on_card(self) -> None:
        # imported here because a process that computes on the CPU does not need them
        from offcompile.runtime.device.cuda.device import CudaDevice
        from offcompile.runtime.device.streams import TorchStreams
        from offcompile.runtime.memory.host_arena import HostArena

        settings = self.settings
        if settings.directories:
            self._open_stores({"disk": settings.disk_bytes})
        device = torch.device(settings.target)
        limit_bytes = settings.host_bytes
        if limit_bytes is not None and self.stores:
            limit_bytes += DISK_LANES * STAGING_BYTES  # staging memory holds no tensors
        added = accelerator(device.type)
        registrar = None if added is None else added.registrar()
        with self._module.device(device):  # registering creates a context on the current device
            self.arena = HostArena(limit_bytes, settings.arena_bytes, registrar)
        self.device = CudaDevice(TorchStreams(device), self.arena, self.stores, STAGING_BYTES)

    @cached_property
    def _directories(self) -> tuple[Path, ...]:
        named = self.settings.directories
        return tuple(map(Path, named)) if named else (default_directory(),)

    def _open_stores(self, capacities: dict[str, int | None]) -> None:
        directories = self._directories
        kind = VerifiedStore if self.settings.verify_spill else SpillStore
        for tier, capacity in capacities.items():
            if capacity != 0:
                self.stores[tier] = kind(directories, capacity)

    def _gauges(self) -> dict[str, int]:
        used = {tier: store.used_bytes for tier, store in self.stores.items()}
        host_bytes, arena_bytes = used.get("host", 0), self.arena.capacity_bytes
        if isinstance(self.arena, Arena):
            arena_bytes += self.arena.overflow_bytes
        else:
            host_bytes = self.arena.used_bytes
        return {
            "spill_bytes": sum(used.values()),
            "host_bytes": host_bytes,
            "spill_bytes_written": sum(s.bytes_written for s in self.stores.values()),
            "arena_bytes": arena_bytes,
            "device_peak_bytes": self._device_peak_bytes(),
            **self._waste(),
        }

    def _waste(self) -> dict[str, int]:
        if self.settings.target != "cpu":
            kept_bytes = self._module.max_memory_reserved(torch.device(self.settings.target))
            return {"heap_waste_bytes": int(kept_bytes) - self._device_peak_bytes()}
        kept = heap()
        return {
            "heap_waste_bytes": kept.waste_bytes,
            "heap_trims": kept.trims,
            "heap_trim_us": kept.trim_ns // 1000,
        }

    def _device_peak_bytes(self) -> int:
        if self.settings.target == "cpu":
            return heap().peak_bytes
        return int(self._module.max_memory_allocated(torch.device(self.settings.target)))

    @property
    def _module(self) -> Any:
        return device_module(torch.device(self.settings.target).type)

    def _close_stores(self) -> None:
        for store in self.stores.values():
            store.close()

    def companion(self, make: Callable[[Mover], Made]) -> Made:
        """Returns what `make` makes of the mover, always the same; it lives as long as this."""
        if make not in self._companions:
            self._companions.setdefault(make, make(self.mover))
        made: Made = self._companions[make]
        return made

    def close(self) -> None:
        """Stop the lanes and release the files; tensors that are still copied out are lost."""
        self._forget_gauges()
        self.mover.close()
        self._close_stores()
        if not isinstance(self.arena, Arena):
            self.arena.close()


class _OpenRuntimes:
    def __init__(self) -> None:
        self.start_afresh()

    def start_afresh(self) -> None:
        self.lock = threading.Lock()
        self.runtimes: dict[str, Runtime] = {}


# per process: graphs name their runtime by its key, so that they can be cached and loaded again
_open = _OpenRuntimes()


def runtime_for(key: str) -> Runtime:
    """The runtime of this key (`RuntimeSettings.key`), created at the first call."""
    runtime = _open.runtimes.get(key)
    if runtime is None:
        settings = RuntimeSettings.from_key(key)
        with _open.lock:
            runtime = _open.runtimes.get(key)
            if runtime is None:
                # graphs are planned while torch traces: staging must not be made of fake tensors
                with _disable_current_modes():
                    runtime = _open.runtimes[key] = Runtime(settings)
    return runtime


def lanes_moved(key: str) -> Mapping[str, Moved]:
    """Totals moved by each lane of this key's runtime; empty if there is no such runtime."""
    runtime = _open.runtimes.get(key)
    return {} if runtime is None else runtime.device.rates.totals()


def runtimes() -> tuple[Runtime, ...]:
    """The open runtimes."""
    return tuple(_open.runtimes.values())


def close_all() -> None:
    """Close every runtime of this process; the next use of a key creates a new one."""
    with _open.lock:
        closing = tuple(_open.runtimes.values())
        _open.runtimes.clear()
    for runtime in closing:
        runtime.close()


def _forget_parents() -> None:
    # the parent's threads and locks mean nothing here, so the child starts without them
    _open.start_afresh()
    forget_parent()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)
