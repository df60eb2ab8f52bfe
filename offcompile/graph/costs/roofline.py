"""Estimates the cost of an op from its floating point operations, its traffic and its workspace.

Used for all ops that are not measured, and for all ops when planning for hardware that is not
present.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS, HardwareProfile
from offcompile.runtime.measure.op import OpCall, TensorSpec
from offcompile.runtime.measure.timing import Overheads
from offcompile.runtime.memory.malloc.glibc import RETURNED_BYTES

FLOP_PER_US_PER_TFLOPS = 1e6

#: overheads for machines on which nothing is measured
USUAL_OVERHEADS = Overheads(op_us=4.0, view_us=1.5, fresh_us_per_mib=0.0)
#: the approximate device time of an empty kernel; views cost only host time
CUDA_OVERHEADS = Overheads(op_us=3.0, view_us=0.0, fresh_us_per_mib=0.0)

_DTYPE_NAMES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.int8: "int8",
}

#: ops that read only the returned part of their table
GATHERS = frozenset({"embedding", "gather", "index", "index_select", "_unsafe_index"})
#: ops that return uninitialized memory
_EMPTY = frozenset(
    {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
)


@dataclass(frozen=True)
class OpCost:
    duration_us: float
    #: memory beyond inputs and outputs while the op runs
    workspace_bytes: int = 0
    #: False if the value exists only inside a fused kernel
    materialises: bool = True
    #: storage → measured duration of the op with that operand in host memory
    in_place: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Work:
    """The work of an op, independent of the machine."""

    flop: float = 0.0
    read_bytes: int = 0
    written_bytes: int = 0
    #: the part of `written_bytes` in outputs so large that each gets fresh memory
    fresh_bytes: int = 0
    dtype: torch.dtype = torch.float32


def op_name(call: OpCall) -> str:
    """`mm` for aten.mm.default."""
    return call.target._schema.name.rpartition("::")[2]


def work_of(call: OpCall) -> Work:
    name, inputs, outputs = op_name(call), call.inputs, call.outputs
    dtype = inputs[0].dtype if inputs else torch.float32
    if name in _EMPTY:
        return Work(dtype=dtype)
    written = sum(spec.nbytes for spec in outputs)
    if name == "put_rows":  # which writes only that part of the whole
        return Work(0.0, inputs[1].nbytes, inputs[1].nbytes, dtype=dtype)
    if name in GATHERS:
        read = sum(spec.nbytes for spec in inputs[1:]) + written
    else:
        read = sum(spec.nbytes for spec in inputs)
    fresh = 0 if call.target._schema.is_mutable else _fresh(outputs)
    return Work(_flop(name, call), read, written, fresh, dtype)


def roofline_us(work: Work, profile: HardwareProfile, overheads: Overheads) -> float:
    """The longer of arithmetic and traffic, plus first touches, plus the call itself."""
    memory = profile.memory_gbps * BYTES_PER_US_PER_GBPS
    fresh_us = work.fresh_bytes / 2**20 * overheads.fresh_us_per_mib
    # the rate for fresh outputs already includes writing them
    touched = work.written_bytes - (work.fresh_bytes if fresh_us else 0)
    traffic_us = (work.read_bytes + touched) / memory
    return overheads.op_us + fresh_us + max(_arithmetic_us(work, profile), traffic_us)


def workspace_bytes(call: OpCall, device_type: str) -> int:
    """Estimate the memory that the usual kernels need beyond inputs and outputs.

    Convolutions reorder every operand into blocks of channels; the backward of fused attention
    accumulates the gradient of the queries in single precision; others need next to nothing.
    """
    name = op_name(call)
    if name in ("convolution", "convolution_backward"):
        read, written = (8, 8) if name == "convolution" else (8, 16)
        if device_type != "cpu":
            read = written = 1
        return sum(_in_blocks(spec, read) for spec in call.inputs) + sum(
            _in_blocks(spec, written) for spec in call.outputs
        )
    if _is_attention(name) and name.endswith("_backward") and len(call.inputs) > 1:
        return call.inputs[1].numel * torch.float32.itemsize
    return 0


def _in_blocks(spec: TensorSpec, channels: int) -> int:
    """Bytes of an operand whose channels are padded to blocks of `channels`. Measured with oneDNN:
    images with one or three channels take as much as those with eight, their gradients twice that.
    """
    if len(spec.size) < 3 or not spec.size[1]:
        return spec.nbytes
    return spec.nbytes // spec.size[1] * (-(-spec.size[1] // channels) * channels)


def _arithmetic_us(work: Work, profile: HardwareProfile) -> float:
    rates: Mapping[str, float] = profile.matmul_tflops
    if work.flop == 0 or not rates:
        return 0.0
    known = rates.get(_DTYPE_NAMES.get(work.dtype, ""))
    tflops = known or rates.get("fp32") or min(rates.values())
    return work.flop / (tflops * FLOP_PER_US_PER_TFLOPS)


def _fresh(outputs: tuple[TensorSpec, ...]) -> int:
    return sum(spec.nbytes for spec in outputs if spec.nbytes >= RETURNED_BYTES)


# --- floating point operations -------------------------------------------------------------


def _flop(name: str, call: OpCall) -> float:
    if name in ("mm", "bmm", "_grouped_mm"):
        return _product(*call.inputs[:2])
    if name in ("addmm", "baddbmm") and len(call.inputs) >= 3:
        return _product(*call.inputs[1:3])
    if name == "convolution" and call.outputs:
        source, weight = call.inputs[:2]
        return _convolution(source, weight, call.outputs[0], transposed=bool(call.args[6]))
    if name == "convolution_backward":
        gradient, source, weight = call.inputs[:3]
        once = _convolution(source, weight, gradient, transposed=bool(call.args[7]))
        wanted = call.args[10]
        return once * (sum(map(bool, wanted[:2])) if isinstance(wanted, list | tuple) else 2)
    if _is_attention(name):
        return _attention(name, call)
    return 0.0


def _product(left: TensorSpec, right: TensorSpec) -> float:
    return 2.0 * left.numel * right.size[-1]


def _convolution(
    source: TensorSpec, weight: TensorSpec, result: TensorSpec, transposed: bool
) -> float:
    # a weight's first dimension is the number of channels of the tensor that it slides over
    over = source if transposed else result
    return 2.0 * over.numel * weight.numel / max(weight.size[0], 1)


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name


def _attention(name: str, call: OpCall) -> float:
    backward = "_backward" in name
    query, key, value = call.inputs[1:4] if backward else call.inputs[:3]
    # queries times keys, then attention weights times values
    per_pair = query.size[-1] + value.size[-1]
    pairs = query.numel // max(query.size[-1], 1) * key.size[-2]
    causal = any(argument is True for argument in call.args) or call.kwargs.get("is_causal") is True
    return 2.0 * pairs * per_pair * (2.5 if backward else 1.0) * (0.5 if causal else 1.0)
