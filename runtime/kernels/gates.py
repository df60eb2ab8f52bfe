"""Decides, in one place, whether a kernel may run, by what each architecture's compiler supports.

NVIDIA devices are checked by compute capability, AMD's by the name of the architecture. Refused
work is left to torch; nothing is tried out on the device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import torch

from offcompile.ir import OffloadError

#: the lowest compute capability that Triton supports
LEAST_CAPABILITY = 80
#: types that need more than that, with the lowest compute capability whose compiler supports them
CAPABILITY_FOR = {torch.float8_e4m3fn: 89}
AMD_ARCHITECTURES = frozenset(
    {"gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1200", "gfx1201"}
)
#: types that kernels support besides integers and bool
FLOATS = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    }
)


@dataclass(frozen=True)
class Architecture:
    """A GPU architecture. `capability` is 90 for sm_90, and 0 for AMD."""

    name: str
    capability: int

    @property
    def nvidia(self) -> bool:
        return self.capability > 0

    @staticmethod
    def named(name: str) -> Architecture:
        """Parse a name such as `sm_90` or `gfx942`."""
        if found := re.fullmatch(r"sm_(\d+)[af]?", name):
            return Architecture(name, int(found[1]))
        if re.fullmatch(r"gfx[0-9a-f]+", name):
            return Architecture(name, 0)
        raise OffloadError(
            f"{name!r} names no architecture: give one like sm_90 (NVIDIA) or gfx942 (AMD)"
        )

    @staticmethod
    def of(device: torch.device) -> Architecture:
        """Returns the architecture of a CUDA (or ROCm) device of this machine."""
        return _of(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _of(index: int) -> Architecture:
    if torch.version.hip:
        name = torch.cuda.get_device_properties(index).gcnArchName
        return Architecture.named(name.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Architecture.named(f"sm_{major}{minor}")


def refusal(architecture: Architecture, *dtypes: torch.dtype) -> str | None:
    """Returns why kernels on tensors of these types cannot run there, None if they can."""
    name = architecture.name
    if architecture.nvidia and architecture.capability < LEAST_CAPABILITY:
        return f"{name} is older than sm_{LEAST_CAPABILITY}, the oldest that Triton supports"
    if not architecture.nvidia and name not in AMD_ARCHITECTURES:
        return f"{name} is not among the AMD architectures that kernels were compiled for"
    for dtype in dtypes:
        if (dtype.is_floating_point and dtype not in FLOATS) or dtype.is_complex:
            return f"kernels know no {dtype}"
        least = CAPABILITY_FOR.get(dtype, 0)
        if architecture.nvidia and architecture.capability < least:
            return f"{dtype} needs sm_{least}, and this is {name}"
    return None
