"""Calls MKL's vector functions once, from one thread, before several threads may be the first.

MKL chooses the kernel of a function at the function's first call. If two of torch's threads make
that call at once, one of them may run a kernel of low accuracy for its part, in this one call, and
all losses after it differ in their last digits. MKL 2024 does so (pytorch/pytorch#188792): without
this, one in ten processes that trained a GPT-2 got other losses, with or without this backend.
"""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offcompile.runtime.base.once import first_time

#: those that torch hands to MKL (ATen/cpu/vml.h)
FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)


def settle_vector_math() -> None:
    """Let MKL, if torch has it, choose its kernels; once in a process."""
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return
    if not first_time("vector math"):
        return
    with _disable_current_modes(), torch.no_grad():
        for dtype in (torch.float32, torch.float64):
            # so small that torch does not share it out
            values = torch.full((1,), 0.5, dtype=dtype, device="cpu")
            for function in FUNCTIONS:
                function(values)
