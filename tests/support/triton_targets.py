"""Compiles kernels for GPUs that need not be there, and reads how wide their accesses came out."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from offcompile.runtime.kernels import Launch, has_triton, load_kernel

TARGETS = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")

if not has_triton():
    _missing = "Triton is not installed: pip install triton"
elif os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
    _missing = "TRITON_INTERPRET is set, and then nothing compiles"
else:
    _missing = ""


def spread(names: Iterable[str], *always: str) -> pytest.MarkDecorator:
    """Parametrize name and target: all names for the targets in `always` and the first name for
    all targets; `make soak` has all pairs."""
    first, *others = names
    pairs = [
        pytest.param(name, target, marks=() if target in always else pytest.mark.soak)
        for name, target in itertools.product(others, TARGETS)
    ]
    return pytest.mark.parametrize(
        ("name", "target"), [*((first, target) for target in TARGETS), *pairs]
    )


needs_compiler = pytest.mark.skipif(bool(_missing), reason=_missing or "there is one")

POINTERS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_PTX_NAMES = {"load": "ld", "store": "st"}
_PTX = r"{}\.global[\w.:]*?(?:\.v(?P<count>\d))?\.[busf](?P<bits>\d+)\s"
_PTX_PIPELINED = r"cp\.async\.c[ag]\.shared\.global\s+\[[^]]*\],\s*\[[^]]*\],\s*0x([0-9a-f]+)"
_AMD = r"(?:global|buffer|flat)_{}_(?:dwordx(?P<dwords>\d)|[us]?(?P<name>dword|short|byte|b\d+))"
_AMD_BITS = {"dword": 32, "short": 16, "byte": 8}


@dataclass(frozen=True)
class Compiled:
    target: str
    assembly: str
    nbytes: int  # of the binary

    def load_bits(self) -> int:
        """Bits of a thread's widest load from global memory."""
        return max(self._widths("load"), default=0)

    def store_bits(self) -> int:
        return max(self._widths("store"), default=0)

    def pipelined_bits(self) -> list[int]:
        """Bits of each load that goes past the registers, on NVIDIA."""
        return [8 * int(found, 16) for found in re.findall(_PTX_PIPELINED, self.assembly)]

    @property
    def stops_on_assertions(self) -> bool:
        return ("__assertfail" if self.target.startswith("sm_") else "s_trap") in self.assembly

    def _widths(self, access: str) -> Iterable[int]:
        if self.target.startswith("sm_"):
            for found in re.finditer(_PTX.format(_PTX_NAMES[access]), self.assembly):
                yield int(found["count"] or 1) * int(found["bits"])
            if access == "load":
                yield from self.pipelined_bits()
            return
        for found in re.finditer(_AMD.format(access), self.assembly):
            if found["dwords"]:
                yield 32 * int(found["dwords"])
            else:
                name = found["name"]
                yield _AMD_BITS[name] if name in _AMD_BITS else int(name[1:])


def compile_launch(launch: Launch, target: str, cache: Path) -> Compiled:
    """The kernel of `launch` for `target` as it would be compiled for these very arguments.

    Its tensors may lie anywhere: only their types matter, and whether their addresses divide by
    16. Triton caches in the folder `cache`.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = load_kernel(launch.kernel)
    numbers = {**launch.numbers, "tiles": launch.tiles}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in launch.tensors:
            tensor = launch.tensors[name]
            signature[name] = f"*{POINTERS[tensor.dtype]}"
            aligned = tensor.data_ptr() % 16 == 0
        elif name in numbers:
            value = numbers[name]
            if isinstance(value, float):
                signature[name] = "fp32"
                continue
            special = not parameter.do_not_specialize
            if special and value == 1:
                signature[name], constants[(i,)] = "constexpr", 1
                continue
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = special and value % 16 == 0
        else:
            signature[name], constants[(i,)] = "constexpr", launch.constants[name]
            continue
        if aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    nvidia = target.startswith("sm_")
    gpu = GPUTarget("cuda", int(target[3:]), 32) if nvidia else GPUTarget("hip", target, 64)
    with mock.patch.dict(os.environ, TRITON_CACHE_DIR=str(cache)):
        made = triton.compile(
            source, target=gpu, options={"num_warps": launch.warps, **launch.options}
        )
    binary = made.asm["cubin" if nvidia else "hsaco"]
    return Compiled(target, made.asm["ptx" if nvidia else "amdgcn"], len(binary))
