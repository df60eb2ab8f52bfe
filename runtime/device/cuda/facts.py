"""The properties of a CUDA device that planning needs, read through torch.cuda only.

Functions that take a `kind` answer for other accelerators too, through their module.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.threads import apart
from offcompile.runtime.memory.accelerators import device_module
from offcompile.runtime.memory.alias import check_alias

#: one part in this many of the free memory is left to the driver and to fragmentation
LEFT_SHARE = 32
SMALL_SIDE = 64


@dataclass(frozen=True)
class CudaFacts:
    index: int
    name: str
    capability: tuple[int, int]
    total_bytes: int
    multiprocessors: int
    cuda: str


def cuda_index(device: torch.device) -> int:
    """The index of the card that `cuda` or `cuda:1` names. OffloadError if there is none."""
    if not torch.cuda.is_available():
        raise OffloadError(
            f"{device} is asked for, and this process sees no CUDA device: torch"
            f" {torch.__version__} was built {_built()}. Install a CUDA build, check the driver and"
            " CUDA_VISIBLE_DEVICES, or run on the CPU."
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    count = torch.cuda.device_count()
    if not 0 <= index < count:
        raise OffloadError(f"There is no cuda:{index}: this process sees {count} CUDA devices.")
    return index


def accelerator_index(device: torch.device) -> int:
    """The index of the device, of an accelerator that was added. OffloadError if there is none."""
    module = device_module(device.type)
    count = module.device_count() if module.is_available() else 0
    index = module.current_device() if device.index is None and count else device.index or 0
    if not 0 <= index < count:
        raise OffloadError(
            f"There is no {device.type}:{index}: this process sees {count} devices of that type."
        )
    return int(index)


def _built() -> str:
    return f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"


@cache
def cuda_facts(index: int) -> CudaFacts:
    found = torch.cuda.get_device_properties(index)
    return CudaFacts(
        index=index,
        name=found.name,
        capability=(found.major, found.minor),
        total_bytes=found.total_memory,
        multiprocessors=found.multi_processor_count,
        cuda=str(torch.version.cuda),
    )


def cuda_identity(index: int) -> dict[str, str | int | bool]:
    """Everything that a measurement on the card depends on: card, driver, torch, its flags."""
    facts = cuda_facts(index)
    return {
        "gpu": facts.name,
        "capability": ".".join(map(str, facts.capability)),
        "memory_gib": facts.total_bytes >> 30,
        "multiprocessors": facts.multiprocessors,
        "cuda": facts.cuda,
        "torch": torch.__version__,
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


def usable_bytes(index: int, kind: str = "cuda") -> int:
    """Bytes that this process could hold on the card: free bytes plus those torch has reserved."""
    module = device_module(kind)
    free_bytes, _ = module.mem_get_info(index)
    reserved_bytes = module.memory_reserved(index)
    whole = int(free_bytes) + int(reserved_bytes)
    return whole - whole // LEFT_SHARE


@cache
def reaches_host(index: int, kind: str = "cuda") -> bool:
    """True if kernels of the card can use pinned host memory in place; False if none is pinned."""
    if not device_module(kind).is_available():
        return False
    try:
        check_alias(torch.device(kind, index))
    except OffloadError:
        return False
    return True


@cache
def library_bytes(index: int) -> int:
    """Workspace bytes that matrix libraries allocate from torch's allocator once, and keep.

    Each thread that has run a matrix product on a stream keeps one until the process ends: that of
    forward, and that on which autograd runs backward (on Hopper, 32 MiB each).
    """
    with torch.cuda.device(index):
        torch.cuda.synchronize(index)
        clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
        if clear is not None:
            clear()
        before = torch.cuda.memory_allocated(index)
        _multiply(index)
        apart(partial(_multiply, index))
        return max(0, torch.cuda.memory_allocated(index) - before)


def _multiply(index: int) -> None:
    with torch.cuda.device(index):
        side = torch.zeros(SMALL_SIDE, SMALL_SIDE, device=f"cuda:{index}")
        torch.addmm(side[0], side, side)
        torch.mm(side.bfloat16(), side.bfloat16())
        torch.cuda.synchronize(index)
