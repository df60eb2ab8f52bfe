"""The thin layer between the CUDA device and torch: streams, events, copies, memory.

Everything the runtime asks of a GPU goes through `Streams`, so that the same code runs on a
simulation that finds races (`simulated_streams`).
"""

from __future__ import annotations

import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch

from offcompile.ir import OffloadError
from offcompile.runtime import kernels
from offcompile.runtime.base.once import forget, made_once
from offcompile.runtime.codecs import TensorCodec
from offcompile.runtime.codecs.kinds import Bitmask, Stash
from offcompile.runtime.codecs.layout import WIDEST_BYTES
from offcompile.runtime.memory.accelerators import device_module
from offcompile.runtime.memory.alias import cuda_alias

from .cuda.facts import reaches_host
from .graphs import StreamGraph, TorchGraph, why_no_graphs

#: opaque to everyone but the layer that made them; streams can be compared with `==`
Stream: TypeAlias = Any
Event: TypeAlias = Any


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that the device's allocator has allocated and reserved; the peak since `reset_peak`."""

    allocated_bytes: int
    peak_allocated_bytes: int
    reserved_bytes: int


class Streams(ABC):
    """Streams of one device. Thread-safe, and independent of the caller's current device."""

    #: for messages
    name: str

    @abstractmethod
    def compute(self) -> Stream:
        """The current compute stream of the calling thread on this device."""

    @abstractmethod
    def stream(self, name: str) -> Stream:
        """The lane stream of this name: one per process, never destroyed."""

    @abstractmethod
    def record(self, stream: Stream, timing: bool = False) -> Event:
        """Record an event behind all work queued on `stream` so far."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Make work queued on `stream` from now on wait for `event`; the host does not wait."""

    @abstractmethod
    def ended(self, event: Event) -> bool:
        """True if the device has passed `event`; raises errors of the work before it."""

    @abstractmethod
    def synchronize(self, event: Event) -> None:
        """Block the host until `ended`, while other threads keep running."""

    def doze(self, event: Event, woken: threading.Event) -> None:
        """Let other threads run until `event` has ended, roughly, or `woken` is set. May return at
        once."""
        del event, woken

    @abstractmethod
    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy between flat uint8 tensors of equal size, one of them on the host.

        Both must stay alive, and the host tensor unchanged, until the copy has ended.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor for use on `compute()`; torch.OutOfMemoryError if there is no room.

        Work that was queued on that stream before may still be using the same memory.
        """

    @abstractmethod
    def scratch(self, stream: Stream, nbytes: int) -> torch.Tensor:
        """Like `empty`, for use on `stream` alone."""

    @abstractmethod
    def why_not_pack(self, in_place: bool) -> str | None:
        """The reason that kernels cannot pack (`in_place`: into host memory); None if they can."""

    @abstractmethod
    def pack(
        self, stream: Stream, codec: TensorCodec, flat: torch.Tensor, packed: torch.Tensor
    ) -> None:
        """Queue kernels that pack a flat device tensor into `packed` (flat uint8, worst-case size).

        `packed` may be host memory that the device can use in place; the same is true in `unpack`.
        """

    @abstractmethod
    def unpack(
        self, stream: Stream, codec: TensorCodec, packed: torch.Tensor, flat: torch.Tensor
    ) -> None:
        """Queue kernels that fill a flat device tensor from `packed`."""

    @property
    def packing_bytes(self) -> int:
        """Device memory that packing has allocated permanently."""
        return 0

    @abstractmethod
    def alias(self, host: torch.Tensor) -> torch.Tensor:
        """A flat uint8 device tensor on the memory of `host`; its storage keeps `host` alive.

        host: flat uint8 on the host. OffloadError if the device cannot use it in place.
        """

    @abstractmethod
    def elapsed_us(self, begin: Event, end: Event) -> float:
        """Device time between two events that have ended and were recorded with `timing`."""

    @abstractmethod
    def memory(self) -> MemoryUse:
        """The allocator's own figures."""

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peaks that `memory` reports."""

    def why_no_graphs(self) -> str | None:
        """The reason that work of these streams cannot be captured; None if it can."""
        return f"{self.name} has no graphs"

    def pool(self) -> object:
        """A new pool for the memory of graphs."""
        raise OffloadError(f"{self.name} has no graphs.")

    def graph(self, pool: object) -> StreamGraph:
        """A new graph, which captures with memory of `pool`."""
        raise OffloadError(f"{self.name} has no graphs.")

    def on_card(self) -> AbstractContextManager[object]:
        """Make the device the calling thread's current one inside the context, for libraries."""
        return nullcontext()

    def let_go(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """Note that the calling thread drops a reference after seeing the tensor's copies end.

        Only race detectors use this: the last reference may die on another thread.
        """

    def taken(self, tensor: torch.Tensor) -> None:  # noqa: B027
        """Note that the calling thread received memory that others released; see `let_go`."""


_STREAM = "a stream"
#: the stream that graphs are captured on
_CAPTURES = "captures"
#: between two looks at a copy that nobody waits for
DOZE_S = 0.002

if hasattr(os, "register_at_fork"):
    # CUDA does not survive a fork: the parent's streams mean nothing in the child
    os.register_at_fork(after_in_child=partial(forget, _STREAM))


class TorchStreams(Streams):
    """A device through its module, `torch.cuda`. Nothing here relies on the current device."""

    def __init__(self, device: torch.device) -> None:
        self._module = device_module(device.type)
        index = self._module.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        self.name = str(self.device)
        self._index = index
        self._packing = threading.Lock()
        self._workspaces: dict[Stream, torch.Tensor] = {}

    def compute(self) -> Stream:
        return self._module.current_stream(self.device)

    def stream(self, name: str) -> Stream:
        # A stream is never destroyed, so the lanes of one device share those of one name. If two
        # threads come first, the stream of one is dropped: torch has a pool of them.
        key = (self.device.type, self._index, name)
        return made_once(_STREAM, key, partial(self._module.Stream, self.device))

    def record(self, stream: Stream, timing: bool = False) -> Event:
        # blocking: waiting threads sleep instead of spinning on a core
        event = self._module.Event(enable_timing=timing, blocking=True)
        event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def ended(self, event: Event) -> bool:
        return bool(event.query())

    def synchronize(self, event: Event) -> None:
        event.synchronize()

    def doze(self, event: Event, woken: threading.Event) -> None:
        # a thread that wakes at each end takes the interpreter's lock from the one that gives work
        # to the device; now and then it finds several that have ended
        with suppress(RuntimeError):  # a failed copy: `synchronize` raises its error
            while not event.query() and not woken.wait(DOZE_S):
                pass

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        # also makes the stream's device current, and restores both
        with self._module.stream(stream):
            target.copy_(source, non_blocking=True)

    def empty(self, nbytes: int) -> torch.Tensor:
        with self._module.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def scratch(self, stream: Stream, nbytes: int) -> torch.Tensor:
        with self._module.stream(stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def why_not_pack(self, in_place: bool) -> str | None:
        reason = kernels.why_not(self.device)
        if reason is None and in_place and not reaches_host(self._index, self.device.type):
            reason = f"{self.device} cannot use host memory in place"
        return reason

    def pack(
        self,
        stream: Stream,
        codec: TensorCodec,
        flat: torch.Tensor,
        packed: torch.Tensor,
    ) -> None:
        room = self._near(packed)
        with self._packing, self._module.stream(stream):
            if isinstance(codec, Stash):
                used = codec.worst_bytes(flat.numel(), flat.dtype)
                return kernels.copy_into(room[:used].view(codec.stash), flat)
            plan, elements = bitmask_plan(codec, flat, staged=room is not packed)
            plan.pack(elements, room, self._workspace(stream, plan.workspace_bytes))

    def unpack(
        self,
        stream: Stream,
        codec: TensorCodec,
        packed: torch.Tensor,
        flat: torch.Tensor,
    ) -> None:
        room = self._near(packed)
        with self._packing, self._module.stream(stream):
            if isinstance(codec, Stash):
                used = codec.worst_bytes(flat.numel(), flat.dtype)
                return kernels.copy_into(flat, room[:used].view(codec.stash))
            plan, elements = bitmask_plan(codec, flat, staged=room is not packed)
            plan.unpack(room, elements, self._workspace(stream, plan.workspace_bytes))

    def _near(self, packed: torch.Tensor) -> torch.Tensor:
        return packed if packed.device.type != "cpu" else self.alias(packed)

    def _workspace(self, stream: Stream, nbytes: int) -> torch.Tensor:
        """The workspace of a stream, whose order serializes its users. Called under the lock."""
        room = self._workspaces.get(stream)
        if room is None or room.numel() < nbytes:
            room = None
            self._workspaces.pop(stream, None)  # freed before the new one is allocated
            room = self._workspaces[stream] = self.scratch(stream, nbytes)
        return room

    @property
    def packing_bytes(self) -> int:
        with self._packing:
            return sum(room.numel() for room in self._workspaces.values())

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return cuda_alias(host, self.device, torch.uint8, host.shape)

    def why_no_graphs(self) -> str | None:
        return why_no_graphs(self._module)

    def pool(self) -> object:
        return self._module.graph_pool_handle()

    def graph(self, pool: object) -> StreamGraph:
        # all on one stream: memory that one graph has freed serves the next one of its pool
        return TorchGraph(self._module, self.stream(_CAPTURES), pool)

    def on_card(self) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._module.device(self.device)
        return context

    def elapsed_us(self, begin: Event, end: Event) -> float:
        return float(begin.elapsed_time(end)) * 1e3

    def memory(self) -> MemoryUse:
        told = self._module.memory_stats(self.device)
        return MemoryUse(
            told.get("allocated_bytes.all.current", 0),
            told.get("allocated_bytes.all.peak", 0),
            told.get("reserved_bytes.all.current", 0),
        )

    def reset_peak(self) -> None:
        self._module.reset_peak_memory_stats(self.device)


def bitmask_plan(
    codec: TensorCodec, flat: torch.Tensor, staged: bool
) -> tuple[kernels.BitmaskPlan, torch.Tensor]:
    """The kernels of a codec, and the elements they take. `staged`: `packed` is on the host."""
    if not isinstance(codec, Bitmask):
        raise OffloadError(
            f'codec "{codec.name}" has no kernels for moves: use bitmask, fp16, bf16, bitmask+fp16'
            " or bitmask+bf16"
        )
    if flat.itemsize > WIDEST_BYTES:
        flat = flat.view(torch.int64)
    return kernels.BitmaskPlan(flat.numel(), flat.dtype, codec.stash, staged), flat


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a dense tensor, in memory order; shares its storage."""
    if tensor.dtype == torch.uint8 and tensor.stride() == (1,):
        return tensor  # to make a view takes longer than most steps of a move
    nbytes = tensor.numel() * tensor.element_size()
    start = tensor.storage_offset() * tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return flat.set_(tensor.untyped_storage(), start, (nbytes,), (1,))


def flat_elements(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Like `flat_bytes`, viewed as elements of `dtype`; None: the tensor's own dtype."""
    return flat_bytes(tensor).view(dtype or tensor.dtype)


def when_storage_dies(tensor: torch.Tensor, died: Callable[[], None]) -> None:
    """Call `died` when the last tensor on this storage is gone, whoever holds it.

    It runs inside a finalizer, on any thread: it must not take a lock. Not at interpreter exit.
    """
    # torch keeps the storage's Python object while anything holds it, including C++
    weakref.finalize(tensor.untyped_storage(), died).atexit = False
