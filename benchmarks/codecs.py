"""Codecs on one thread of this machine, beside copies of the same bytes in the same breath.

`python -m benchmarks.codecs` writes `results/codecs.md`. A round times a copy, packing and
unpacking one after the other; the table has the medians over rounds, and of the shares too, for the
machine drifts between rounds. Rates are of raw bytes.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from offcompile.runtime.codecs import codec, density, engine

RESULT = Path(__file__).parent / "results" / "codecs.md"
KIB, MIB = 1 << 10, 1 << 20
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 8 * MIB, 64 * MIB)
OTHER_TYPES = (torch.bfloat16, torch.float16, torch.float64, torch.int8)
ZEROS = (0.0, 0.3, 0.5, 0.75, 0.95)
OTHERS = ("fp16", "bf16", "bitmask+fp16", "bitmask+bf16", "sign")
#: least bytes of one measurement; small tensors are packed again and again
LEAST_BYTES = 4 * MIB


@dataclass(frozen=True)
class Row:
    codec: str
    dtype: torch.dtype
    nbytes: int
    zeros: float
    rates: tuple[float, ...]  # of a copy, packing, unpacking, counting; GB/s
    shares: tuple[float, ...]  # of the copy's


def drawn(dtype: torch.dtype, numel: int, zeros: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    kept = torch.rand(numel, generator=generator) >= zeros
    if not dtype.is_floating_point:
        return torch.randint(1, 100, (numel,), generator=generator).mul_(kept).to(dtype)
    return torch.randn(numel, generator=generator).mul_(kept).to(dtype)


def measure(name: str, dtype: torch.dtype, nbytes: int, zeros: float, rounds: int) -> Row:
    x = drawn(dtype, nbytes // dtype.itemsize, zeros)
    how, back = codec(name), torch.zeros_like(x)
    packed = torch.zeros(how.worst_bytes(x.numel(), dtype), dtype=torch.uint8)
    used = packed[: how.pack(x, packed)]
    calls: tuple[Callable[[], object], ...] = (
        lambda: back.copy_(x),
        lambda: how.pack(x, packed),
        lambda: how.unpack(used, back),
        lambda: density(x),
    )
    times = max(1, LEAST_BYTES // nbytes)
    found = [[_gbps(call, times, nbytes) for call in calls] for _ in range(rounds)]
    rates = tuple(statistics.median(column) for column in zip(*found, strict=True))
    shares = [[rate / copied for rate in rest] for copied, *rest in found]
    return Row(
        name,
        dtype,
        nbytes,
        zeros,
        rates,
        tuple(statistics.median(column) for column in zip(*shares, strict=True)),
    )


def _gbps(call: Callable[[], object], times: int, nbytes: int) -> float:
    began = time.perf_counter()
    for _ in range(times):
        call()
    return times * nbytes / (time.perf_counter() - began) / 1e9


def rows(rounds: int) -> Iterator[Row]:
    for nbytes in SIZES:
        for zeros in ZEROS:
            yield measure("bitmask", torch.float32, nbytes, zeros, rounds)
    for dtype in OTHER_TYPES:
        for nbytes in (256 * KIB, 64 * MIB):
            for zeros in (0.0, 0.5, 0.95):
                yield measure("bitmask", dtype, nbytes, zeros, rounds)
    for name in OTHERS:
        for nbytes in (256 * KIB, 64 * MIB):
            yield measure(name, torch.float32, nbytes, 0.5, rounds)


def table(found: Iterable[Row]) -> Iterator[str]:
    heads = ("codec", "type", "size", "zeros", "copy GB/s", "pack", "unpack", "density")
    yield f"| {' | '.join((*heads, 'pack / copy', 'unpack / copy'))} |"
    yield "|---" * (len(heads) + 2) + "|"
    for row in found:
        size = f"{row.nbytes // MIB} MiB" if row.nbytes >= MIB else f"{row.nbytes // KIB} KiB"
        dtype = str(row.dtype).removeprefix("torch.")
        rates = " | ".join(f"{rate:.1f}" for rate in row.rates)
        shares = " | ".join(f"{share:.0%}" for share in row.shares[:2])
        yield f"| {row.codec} | {dtype} | {size} | {row.zeros:.0%} | {rates} | {shares} |"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=7)
    rounds: int = arguments.parse_args().rounds
    torch.set_num_threads(1)
    title = f"{engine().name}, one thread of {os.cpu_count()}, {platform.machine()}, "
    lines = [
        "# Codecs beside a copy",
        "",
        f"`python -m benchmarks.codecs`: {title}PyTorch {torch.__version__}.",
        f"Medians of {rounds} rounds, each of which times all columns one after the other. Rates",
        "are of raw bytes. Small tensors lie in caches, where copies are fastest, and a call costs",
        "3 µs in Python.",
        "",
        *table(rows(rounds)),
    ]
    RESULT.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
