"""One kernel launch as a value, whose arguments can be inspected, compiled or run."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from offcompile.ir import OffloadError

from .gates import Architecture, refusal

INSTALL = (
    'kernels need Triton: pip install "offcompile[cuda]" '
    "(PyTorch for CUDA or ROCm brings its own; beside PyTorch for CPU: pip install triton)"
)
#: CUDA allows a longer x axis of a grid; ROCm limits the number of threads to 2**32 - 1.
#: With more tiles than this, programs process several each.
MOST_PROGRAMS = 2**22


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def load_kernel(name: str) -> Any:
    """Load the kernel named `module:function` from `code/`; raises OffloadError without Triton."""
    if not has_triton():
        raise OffloadError(INSTALL)
    module, function = name.split(":")
    try:
        code = import_module(f"{__package__}.code.{module}")
    except ImportError as error:
        raise OffloadError(f"{INSTALL}. It is there, but cannot be imported: {error}") from error
    return getattr(code, function)


def why_not(device: torch.device, *dtypes: torch.dtype) -> str | None:
    """Returns why kernels on tensors of these types do not run on `device`; None if they do."""
    if device.type != "cuda":
        return f"kernels run on CUDA devices, and this is {device.type}"
    if not has_triton():
        return INSTALL
    return refusal(Architecture.of(device), *dtypes)


def interpreted(kernel: Any) -> bool:
    """True if the kernel runs in Triton's interpreter, on CPU tensors (TRITON_INTERPRET=1)."""
    return type(kernel).__name__ == "InterpretedFunction"


@dataclass(frozen=True)
class Launch:
    """A kernel (`module:function` in `code/`) and its arguments by name.

    `tiles` is also passed to the kernel: program p processes tiles p, p + programs, … below it.
    `constants` are compiled in, and so are `options`, the compiler's own.
    """

    kernel: str
    tensors: Mapping[str, torch.Tensor]
    numbers: Mapping[str, int | float]
    tiles: int
    warps: int
    constants: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, int] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        devices = {t.device for t in self.tensors.values()}
        if len(devices) != 1:
            named = ", ".join(f"{name} on {t.device}" for name, t in self.tensors.items())
            raise OffloadError(
                f"{self.kernel} needs all tensors on one device, got {named}: "
                "host memory takes part through its alias on the device"
            )
        return devices.pop()

    def why_not(self) -> str | None:
        """Returns why it cannot run compiled on its tensors' device; None if it can."""
        return why_not(self.device, *(t.dtype for t in self.tensors.values()))

    def run(self, most_programs: int | None = None) -> None:
        """Queue the kernel on the current stream of its tensors' device, invisibly to autograd.

        `most_programs` limits the share of the device that it can occupy.
        """
        if most_programs is not None and most_programs < 1:
            raise OffloadError(f"{most_programs} programs run nothing: give 1 or more, or None")
        kernel, device = load_kernel(self.kernel), self.device
        if not interpreted(kernel) and (reason := self.why_not()):
            raise OffloadError(f"{self.kernel} cannot run: {reason}")
        if not self.tiles:
            return
        programs = min(self.tiles, most_programs or MOST_PROGRAMS, MOST_PROGRAMS)
        # Triton launches on torch's current device and that device's current stream
        guard: AbstractContextManager[object] = (
            torch.cuda.device(device) if device.type == "cuda" else nullcontext()
        )
        with guard:
            kernel[(programs,)](**self.arguments())

    def arguments(self) -> dict[str, Any]:
        """Returns the kernel's arguments."""
        return {
            **self.tensors,
            **self.numbers,
            "tiles": self.tiles,
            **self.constants,
            "num_warps": self.warps,
            **self.options,
        }
