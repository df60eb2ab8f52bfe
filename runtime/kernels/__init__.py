"""Device kernels: Triton if it is installed and supports the device, torch otherwise.

Each operation comes in three forms: `x_torch`, the reference; `x_launch`, the kernel launch for
given tensors as a value; and the plain name, which runs the kernel if it can, and torch otherwise.
Packing has no such fallback: its reference is `runtime.codecs`, on the CPU. Importing this package
does not import Triton.
"""

from .adamw import AdamStep, AdamTensors, adam_launch, adam_torch, adam_update
from .bitmask import BitmaskPlan, kept_at, signs_launch, unsigns_launch
from .copying import copy_into, copy_launch, copy_torch
from .gates import AMD_ARCHITECTURES, Architecture, refusal
from .gathering import gather_launch, gather_rows, gather_torch
from .launch import Launch, has_triton, load_kernel, why_not
from .streaming import (
    Blocks,
    stream_launch,
    stream_matmul,
    stream_torch,
    streamable,
    write_launch,
    write_matmul,
    write_torch,
)
from .tuning import CANDIDATES, Config, config_for, device_time_us, fastest

__all__ = [
    "AMD_ARCHITECTURES",
    "CANDIDATES",
    "AdamStep",
    "AdamTensors",
    "Architecture",
    "BitmaskPlan",
    "Blocks",
    "Config",
    "Launch",
    "adam_launch",
    "adam_torch",
    "adam_update",
    "config_for",
    "copy_into",
    "copy_launch",
    "copy_torch",
    "device_time_us",
    "fastest",
    "gather_launch",
    "gather_rows",
    "gather_torch",
    "has_triton",
    "kept_at",
    "load_kernel",
    "refusal",
    "signs_launch",
    "stream_launch",
    "stream_matmul",
    "stream_torch",
    "streamable",
    "unsigns_launch",
    "why_not",
    "write_launch",
    "write_matmul",
    "write_torch",
]
