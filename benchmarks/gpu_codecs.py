"""Codecs on a GPU beside copies of the same bytes: `python -m benchmarks.gpu_codecs`.

Prints a table in Markdown. Rates are of raw bytes: to the device's memory a copy reads and writes
them all, packing reads them twice and writes what is left.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from offcompile.runtime import kernels
from offcompile.runtime.kernels import BitmaskPlan
from offcompile.runtime.memory.alias import cuda_alias
from offcompile.runtime.memory.host_arena import HostArena

LENGTH = 1 << 26
ZEROS = (0.0, 0.5, 0.75, 0.95)
STASHES = {"bitmask": None, "bitmask+bf16": torch.bfloat16}


@dataclass(frozen=True)
class Rate:
    what: str
    where: str  # the packed side lies
    zeros: float
    gbps: float
    copy_gbps: float


def measure(length: int = LENGTH) -> list[Rate]:
    """Measure codecs on float32 tensors of `length` elements, on the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    most = max(BitmaskPlan(length, torch.float32).layout.worst_bytes, 1 << 20)
    arena = HostArena(2 * most, 2 * most)
    try:
        host = cuda_alias(arena.block(most), device, torch.uint8, (most,))
        there = torch.empty(most, dtype=torch.uint8, device=device)
        found = list(_rates(length, {"host": host, "device": there}, device))
        torch.cuda.synchronize()
        del host
    finally:
        arena.close()
    return found


def _rates(length: int, places: dict[str, torch.Tensor], device: torch.device) -> Iterator[Rate]:
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(length, device=device, generator=generator)
    back = torch.empty_like(x)

    def rate(call: Callable[[], object]) -> float:
        return x.nbytes / kernels.device_time_us(call, device) / 1e3

    for where, packed in places.items():
        raw = packed[: x.nbytes].view(torch.float32)
        copies = {
            "pack": rate(partial(kernels.copy_into, raw, x)),
            "unpack": rate(partial(kernels.copy_into, back, raw)),
        }
        for zeros in ZEROS:
            kept = torch.rand(length, device=device, generator=generator) >= zeros
            sparse = x * kept
            for name, stash in STASHES.items():
                plan = BitmaskPlan(length, torch.float32, stash, staged=where == "host")
                work = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=device)
                calls = {
                    "pack": partial(plan.pack, sparse, packed, work),
                    "unpack": partial(plan.unpack, packed, back, work),
                }
                for way, call in calls.items():
                    yield Rate(f"{name}: {way}", where, zeros, rate(call), copies[way])
                if not torch.equal(back, sparse if stash is None else sparse.to(stash).float()):
                    raise RuntimeError(
                        f"{name} to the {where} at {zeros:.0%} zeros came back wrong"
                    )


def text_of(rates: Sequence[Rate]) -> str:
    """A table in Markdown."""
    lines = ["| codec | packed side | zeros | GB/s | of a copy |", "|---|---|---|---|---|"]
    for r in rates:
        share = r.gbps / r.copy_gbps
        lines.append(f"| {r.what} | {r.where} | {r.zeros:.0%} | {r.gbps:.1f} | {share:.0%} |")
    return "\n".join(lines)


def main() -> int:
    if not torch.cuda.is_available() or not kernels.has_triton():
        print("codecs are measured on a CUDA device with Triton, and there is none here")
        return 1
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}\n\n{text_of(measure())}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
