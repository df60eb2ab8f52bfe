"""The target of a graph: its device, its share of that device, its links, and its runtime.

There are two targets. On the CPU the device is a budget of RAM and the slow tiers are files. On
CUDA the device is the card, the host tier is pinned memory, and the disk is a third tier if the
user names a directory or limits the host. Accelerators that were added are targets as CUDA is.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from offcompile.ir import DEVICE, Machine, OffloadError
from offcompile.runtime.base.host_limits import default_limit_bytes
from offcompile.runtime.base.once import made_once
from offcompile.runtime.base.process_memory import machine_memory_bytes
from offcompile.runtime.device.cuda.facts import (
    accelerator_index,
    cuda_facts,
    cuda_index,
    library_bytes,
    reaches_host,
    usable_bytes,
)
from offcompile.runtime.disk.directories import check_directory, default_directory
from offcompile.runtime.memory.accelerators import accelerator, device_module
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.advice import SPLINTER_BYTES, malloc_leaves_holes
from offcompile.runtime.memory.malloc.fragmentation import HeapLimit
from offcompile.runtime.memory.malloc.glibc import RETURNED_BYTES
from offcompile.runtime.memory.malloc.heap import MARGIN_BYTES, address_space_is_limited, heap
from offcompile.runtime.moves.registry import RuntimeSettings

from .hardware import BYTES_PER_US_PER_GBPS, HardwareProfile, load_profile
from .in_place import InPlace
from .option_values import default_spill
from .options import Options
from .this_gpu import this_gpu, to_cuda_machine
from .this_machine import codec_gbps, this_machine, to_cpu_machine
from .tolls import with_tolls

KIB, MIB = 1 << 10, 1 << 20
#: the runtime's own part of a budget, for staging and for holes too small to be reused
RESERVE_SHARE, LEAST_RESERVE, MOST_RESERVE = 64, 512 * KIB, 32 * MIB
#: the part of a budget left for holes between tensors, where more moves cost nothing
HOLES_SHARE = 4
#: on CUDA: rounding to the allocator's blocks, in addition to the memory of the libraries
LEAST_CUDA_RESERVE = 1 * MIB
#: on CUDA: the part left to torch's allocator, which splits and caches blocks itself; steps that
#: compute again leave 2.7% in gaps (docs/gpu.md)
CUDA_HOLES_SHARE = 32
#: on CUDA: assumed slowdown of direct access over a copy, if it was not measured
UNMEASURED_DIRECT = 2
#: a library's product reads an operand over the link once for each so many rows of the other
#: (measured with bf16 on an H100: 4 times at 1,024 rows, 31 times at 8,192)
ROWS_A_READ = 256
#: files up to this part of the machine's memory are assumed to stay in its page cache
CACHED_SHARE = 2
#: size of staging: one block per lane that writes
ARENA_BYTES = 512 * KIB
#: most bytes per system call: large, since each call waits for the GIL when it ends
CHUNK_BYTES = 8 * MIB


class Target(ABC):
    """A device, and everything about it that planning and running require."""

    profile: HardwareProfile
    directories: tuple[Path, ...]
    #: upper limit of a budget
    device_bytes: int
    #: capacity of the host tier; None if it has no limit
    host_bytes: int | None
    #: bytes of every budget that libraries hold, even where nothing moves
    library_bytes: int = 0
    #: share of a step that a plan must gain before weights live on the host
    worth_leaving: ClassVar[float] = 0.01

    @property
    @abstractmethod
    def device(self) -> torch.device: ...

    @abstractmethod
    def machine(self, device_bytes: int) -> Machine:
        """The machine, with this capacity of the device."""

    @property
    def whole_bytes(self) -> int:
        """Bytes of the device, with those that nothing can be planned for."""
        return self.device_bytes

    @property
    def host_room_bytes(self) -> int | None:
        """Bytes of the host tier that plans may take; None if it has no limit."""
        return self.host_bytes

    def budget_bytes(self, options: Options) -> int | None:
        """The budget that the options ask for; None: the minimum, which depends on the problem."""
        return options.memory_bytes(self.device_bytes, self.whole_bytes)

    @property
    @abstractmethod
    def runtime(self) -> RuntimeSettings: ...

    def in_place(self, host_bytes: int) -> InPlace | None:
        """The cost of using an operand in place on the host, if weights and gradients of
        `host_bytes` live there; None if the runtime does not support it."""
        return None

    def with_codecs(self) -> Target:
        """The same target with the speeds of codecs on this machine, measured if necessary."""
        return self

    @abstractmethod
    def reserve_bytes(self, budget_bytes: int) -> int:
        """The bytes of a budget that the runtime itself takes."""

    def kept_back_bytes(self, budget_bytes: int, moves: bool) -> int:
        """The bytes of a budget that tensors cannot have; fewer if nothing moves."""
        return self.reserve_bytes(budget_bytes) if moves else self.library_bytes

    @abstractmethod
    def holes_bytes(self, budget_bytes: int) -> int:
        """The bytes that the runtime wants beside its reserve, so that it can keep freed blocks."""

    def room(self, budget_bytes: int) -> HeapLimit | None:
        """The limits on blocks and the holes between them; None if no memory returns to the OS."""
        return None


@dataclass(frozen=True)
class CpuTarget(Target):
    """The device is a budget of RAM; the slow tiers are files."""

    profile: HardwareProfile
    directories: tuple[Path, ...]
    device_bytes: int
    host_bytes: int | None
    verify_spill: bool = False
    #: the pages of weights in mapped files are the same RAM, if the system has it to spare, so that
    #: a process holds more than its budget
    worth_leaving: ClassVar[float] = 0.25

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def machine(self, device_bytes: int) -> Machine:
        whole = to_cpu_machine(self.profile, None, self.host_bytes)
        return with_tolls(whole.with_capacity(DEVICE, device_bytes), self.profile)

    @property
    def runtime(self) -> RuntimeSettings:
        return _cpu_runtime(self.directories, self.host_bytes, self.verify_spill)

    def in_place(self, host_bytes: int) -> InPlace | None:
        if host_bytes <= self.device_bytes // CACHED_SHARE:
            return InPlace()
        # pages are faulted in when touched, not ahead, half as fast as a copy (docs/backend.md)
        touching = 2 / (self.profile.h2d_gbps * BYTES_PER_US_PER_GBPS)
        return InPlace(touching, touching)

    def with_codecs(self) -> CpuTarget:
        return replace(self, profile=replace(self.profile, codec_gbps=codec_gbps()))

    def reserve_bytes(self, budget_bytes: int) -> int:
        return min(max(budget_bytes // RESERVE_SHARE, LEAST_RESERVE), MOST_RESERVE)

    def holes_bytes(self, budget_bytes: int) -> int:
        return budget_bytes // HOLES_SHARE

    def room(self, budget_bytes: int) -> HeapLimit | None:
        if not heap().gives_back:
            return None
        return HeapLimit(
            budget_bytes,
            0 if tensor_memory.will_fit() else MARGIN_BYTES,
            SPLINTER_BYTES if malloc_leaves_holes(os.environ) else 0,
            RETURNED_BYTES if address_space_is_limited() else None,
        )


@dataclass(frozen=True)
class CudaTarget(Target):
    """The device is one card. `library_bytes`: its memory that matrix libraries hold for good.

    kind: its type in torch, `cuda` or that of an accelerator that was added.

    card_bytes: its memory in all, with what others and the driver hold; 0: no more is known.
    reaches_host: True if kernels can use pinned memory in place, as offloaded weights require.
    `directories` may be empty: then there is no disk tier.
    host_limit_bytes: capacity of the machine's host arenas where `host_bytes` sets none; None for a
    card of another machine.
    packs: True if tensors may be packed as they leave. The host reads packed sizes in each step, as
    no CUDA graph can.
    """

    profile: HardwareProfile
    directories: tuple[Path, ...]
    device_bytes: int
    host_bytes: int | None
    index: int = 0
    library_bytes: int = 0
    reaches_host: bool = True
    verify_spill: bool = False
    card_bytes: int = 0
    kind: str = "cuda"
    host_limit_bytes: int | None = None
    packs: bool = True

    @property
    def host_room_bytes(self) -> int | None:
        return self.host_limit_bytes if self.host_bytes is None else self.host_bytes

    @property
    def device(self) -> torch.device:
        return torch.device(self.kind, self.index)

    @property
    def whole_bytes(self) -> int:
        return max(self.card_bytes, self.device_bytes)

    def machine(self, device_bytes: int) -> Machine:
        whole = to_cuda_machine(self.profile, self.host_room_bytes, bool(self.directories))
        if self.kind != "cuda" or not self.packs:
            whole = replace(whole, codecs=())  # the kernels that pack are for CUDA
        return whole.with_capacity(DEVICE, device_bytes)

    @property
    def runtime(self) -> RuntimeSettings:
        name = f"{self.kind}:{self.index}"
        return _card_runtime(name, self.directories, self.host_bytes, self.verify_spill)

    def in_place(self, host_bytes: int) -> InPlace | None:
        if not self.reaches_host:
            return None
        direct, profile = self.profile.direct_gbps, self.profile
        link = min(profile.h2d_gbps, profile.d2h_gbps) / UNMEASURED_DIRECT
        # ordinary kernels load their operands on demand, so nothing of it overlaps
        reading, writing = (direct.get(w, link) * BYTES_PER_US_PER_GBPS for w in ("read", "write"))
        return InPlace(1 / reading, 1 / writing, ROWS_A_READ)

    def reserve_bytes(self, budget_bytes: int) -> int:
        rounding = min(max(budget_bytes // RESERVE_SHARE, LEAST_CUDA_RESERVE), MOST_RESERVE)
        return self.library_bytes + rounding

    def holes_bytes(self, budget_bytes: int) -> int:
        # only a budget of nearly the whole card competes with the allocator's cached blocks
        whole = budget_bytes > self.device_bytes * (1 - 1 / CUDA_HOLES_SHARE)
        return budget_bytes // CUDA_HOLES_SHARE if whole else 0


def target_for(
    options: Options,
    device: torch.device | None = None,
    progress: Callable[[str], None] | None = None,
) -> Target:
    """Creates the target: checks the spill directories, and measures the machine unless a
    profile is named."""
    if device is not None and device.type == "cuda":
        return _cuda_target(options, device, progress)
    if device is not None and accelerator(device.type) is not None:
        return _accelerator_target(options, device)
    if device is not None and device.type != "cpu":
        raise OffloadError(
            f"This graph computes on {device}; offcompile moves tensors of the CPU and of CUDA"
            " devices so far. Compile it with backend='inductor', or add the accelerator"
            " (docs/gpu.md)."
        )
    directories = _cpu_directories(options)
    if options.hardware is not None:
        profile = load_profile(options.hardware)
    else:
        profile = _measured(directories, progress)
    return CpuTarget(
        profile, directories, machine_memory_bytes(), options.host_memory, options.verify_spill
    )


def _cuda_target(
    options: Options, device: torch.device, progress: Callable[[str], None] | None
) -> CudaTarget:
    index = cuda_index(device)
    directories = _cuda_directories(options)
    if options.hardware is not None:
        profile = load_profile(options.hardware)
    else:
        profile = this_gpu(index, directories, progress=progress)
    return CudaTarget(
        profile,
        directories,
        usable_bytes(index),
        options.host_memory,
        index,
        library_bytes(index),
        reaches_host(index),
        options.verify_spill,
        cuda_facts(index).total_bytes,
        host_limit_bytes=default_limit_bytes(),
        packs=not options.cudagraphs,
    )


def _accelerator_target(options: Options, device: torch.device) -> CudaTarget:
    if options.hardware is None:
        raise OffloadError(
            f"The rates of {device} cannot be measured: name a profile of them with"
            ' options={"hardware": …} (docs/options.md).'
        )
    kind, index = device.type, accelerator_index(device)
    total_bytes = int(device_module(kind).mem_get_info(index)[1])
    return CudaTarget(
        load_profile(options.hardware),
        _cuda_directories(options),
        usable_bytes(index, kind),
        options.host_memory,
        index,
        reaches_host=reaches_host(index, kind),
        verify_spill=options.verify_spill,
        card_bytes=total_bytes,
        kind=kind,
        host_limit_bytes=default_limit_bytes(),
    )


def runtime_settings(options: Options, device: torch.device) -> RuntimeSettings:
    """The runtime settings of a graph compiled with these options for this device."""
    if device.type != "cpu":
        index = cuda_index(device) if device.type == "cuda" else accelerator_index(device)
        directories, name = _cuda_directories(options), f"{device.type}:{index}"
        return _card_runtime(name, directories, options.host_memory, options.verify_spill)
    return _cpu_runtime(_cpu_directories(options), options.host_memory, options.verify_spill)


def _cpu_runtime(
    directories: tuple[Path, ...], host_bytes: int | None, verify_spill: bool
) -> RuntimeSettings:
    return RuntimeSettings(
        target="cpu",
        directories=tuple(str(d) for d in directories),
        host_bytes=host_bytes,
        arena_bytes=ARENA_BYTES,
        chunk_bytes=CHUNK_BYTES,
        verify_spill=verify_spill,
    )


def _card_runtime(
    target: str, directories: tuple[Path, ...], host_bytes: int | None, verify_spill: bool
) -> RuntimeSettings:
    return RuntimeSettings(
        target=target,
        directories=tuple(str(d) for d in directories),
        host_bytes=host_bytes,
        verify_spill=verify_spill,
    )


def _cpu_directories(options: Options) -> tuple[Path, ...]:
    directories = options.spill
    if directories == default_spill():
        directories = (default_directory(),)
    for directory in directories:
        check_directory(directory)
    return directories


def _cuda_directories(options: Options) -> tuple[Path, ...]:
    """No directories unless a disk was requested or the host is limited."""
    if options.spill == default_spill() and options.host_memory is None:
        return ()
    return _cpu_directories(options)


def _measured(
    directories: tuple[Path, ...], progress: Callable[[str], None] | None
) -> HardwareProfile:
    make = partial(this_machine, directories, progress=progress)
    return made_once("this machine", directories, make)
