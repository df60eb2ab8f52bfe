"""Measures a CUDA device and its link to the host with events in its streams.

Figures are medians of runs on a warm device; rates are in bytes or operations per microsecond.
Every call to CUDA goes through `DriverCalls`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

from offcompile.runtime.device.cuda.calls import COMPUTE, LOADS, OUTS, DriverCalls

from .host import AttentionShape, attention_passes

FLOATS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
LATENCY_BYTES = 4096
NOISE_NUMBERS = 1 << 20
_ATTENTION = AttentionShape(4, 16, 2048, 64)


@dataclass(frozen=True)
class Sizes:
    """The amount of data, compute and runs for each figure."""

    copy_bytes: int = 256 << 20
    memory_bytes: int = 1 << 30
    pin_bytes: int = 1 << 30
    #: a row of an embedding, and of a matrix that is read in part
    row_bytes: int = 4096
    matmul_side: int = 8192
    attention: AttentionShape = _ATTENTION
    launches: int = 1000
    small_copies: int = 50
    both_copies: int = 12
    runs: int = 9
    warm_runs: int = 20


QUICK = Sizes(
    copy_bytes=64 << 20,
    memory_bytes=256 << 20,
    pin_bytes=256 << 20,
    matmul_side=4096,
    attention=AttentionShape(2, 8, 2048, 64),
    launches=300,
    small_copies=20,
    both_copies=8,
    runs=5,
    warm_runs=5,
)

Measure = Callable[[DriverCalls, Sizes], dict[str, float]]


class PinningFailed(RuntimeError):
    """CUDA refused to register host memory; `code` is its error."""

    def __init__(self, code: int) -> None:
        super().__init__(f"CUDA refused to register host memory (error {code})")
        self.code = code


def warm_up(calls: DriverCalls, sizes: Sizes) -> None:
    """Let clocks rise and libraries load."""
    left = _noise(calls, sizes.matmul_side, sizes.matmul_side, torch.float16)
    for _ in range(sizes.warm_runs):
        calls.issue("warm", 1.0, COMPUTE, lambda: torch.mm(left, left))
    calls.settle()


# --- the link ------------------------------------------------------------------------------


def link(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """The rates `h2d` and `d2h` of large pinned copies, and the `latency` of a small one."""
    nbytes = sizes.copy_bytes
    host, device = calls.pinned(nbytes), _bytes(calls, nbytes)
    few_host, few = host[:LATENCY_BYTES], device[:LATENCY_BYTES]
    small_us = [
        _median_us(calls, "latency", 1.0, lane, call, sizes.small_copies)
        for lane, call in (
            (LOADS, lambda: few.copy_(few_host, non_blocking=True)),
            (OUTS, lambda: few_host.copy_(few, non_blocking=True)),
        )
    ]
    load = _median_us(
        calls, "h2d", nbytes, LOADS, lambda: device.copy_(host, non_blocking=True), sizes.runs
    )
    out = _median_us(
        calls, "d2h", nbytes, OUTS, lambda: host.copy_(device, non_blocking=True), sizes.runs
    )
    return {"h2d": nbytes / load, "d2h": nbytes / out, "latency": max(small_us)}


def both_ways(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """The rate of each direction, from copies that ran while the other direction was busy."""
    nbytes = sizes.copy_bytes // 4
    hosts = [calls.pinned(nbytes) for _ in range(2)]
    devices = [_bytes(calls, nbytes) for _ in range(2)]
    begin = calls.mark(COMPUTE)
    marks = {}
    for lane in (LOADS, OUTS):
        calls.follow(lane, begin)
        marks[lane] = [calls.mark(lane)]
    for _ in range(sizes.both_copies):
        for lane, target, source in (
            (LOADS, devices[0], hosts[0]),
            (OUTS, hosts[1], devices[1]),
        ):
            copy = _copy(target, source)
            calls.issue(f"{lane}_both", nbytes, lane, copy)
            marks[lane].append(calls.mark(lane))
    times = {lane: [calls.elapsed_us(begin, m) for m in found] for lane, found in marks.items()}
    calls.settle()
    loads, outs = rates_together(times[LOADS], times[OUTS], nbytes)
    return {"h2d_both": loads, "d2h_both": outs}


def rates_together(
    first: Sequence[float], second: Sequence[float], nbytes: int
) -> tuple[float, float]:
    """Rates of two lanes, from the end of each copy of `nbytes` (and the start of the first).

    Only copies that ran entirely while both lanes were busy count; if there are none, all do.
    """
    begin, end = max(first[0], second[0]), min(first[-1], second[-1])

    def rate(times: Sequence[float]) -> float:
        taken = [b - a for a, b in pairwise(times) if a >= begin and b <= end]
        return nbytes / statistics.median(taken or [b - a for a, b in pairwise(times)])

    return rate(first), rate(second)


def direct(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """Rates of useful bytes that kernels read from and write to host memory in place."""
    host = calls.alias(calls.pinned(sizes.copy_bytes)).view(torch.float32)
    device = _bytes(calls, sizes.copy_bytes).view(torch.float32)
    whole = sizes.copy_bytes
    row = sizes.row_bytes // 4
    host_rows = host.view(-1, row)
    count = host_rows.shape[0]
    # an eighth of each row, as a slice of the columns of a matrix
    part = max(1, row // 8)
    host_part, device_part = host_rows[:, :part], device[: count * part].view(count, part)
    picked = torch.randperm(count)[: max(1, count // 2)].to(calls.device)

    def us(kind: str, nbytes: int, call: Callable[[], object]) -> float:
        return nbytes / _median_us(calls, kind, nbytes, COMPUTE, call, sizes.runs)

    partly, rows = device_part.nbytes, picked.numel() * sizes.row_bytes
    return {
        "read": us("read", whole, lambda: calls.move(device, host)),
        "read_strided": us("read_strided", partly, lambda: calls.move(device_part, host_part)),
        "read_gather": us("read_gather", rows, lambda: calls.gather(host_rows, picked)),
        "write": us("write", whole, lambda: calls.move(host, device)),
        "write_strided": us("write_strided", partly, lambda: calls.move(host_part, device_part)),
    }


def pinning(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """`pin`: microseconds per GiB. Raises `PinningFailed`."""
    taken_us, code = calls.pin_us(sizes.pin_bytes)
    if code:
        raise PinningFailed(code)
    return {"pin": taken_us * (1 << 30) / sizes.pin_bytes}


# --- the device itself ---------------------------------------------------------------------


def memory(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """Rate of a copy within the device: bytes read plus bytes written."""
    half = sizes.memory_bytes // 2
    source, target = _bytes(calls, half), _bytes(calls, half)
    moved = 2.0 * half
    taken = _median_us(calls, "memory", moved, COMPUTE, _copy(target, source), sizes.runs)
    return {"memory": moved / taken}


def matmul(calls: DriverCalls, sizes: Sizes, dtype: str) -> dict[str, float]:
    """Operations per microsecond of a compute-bound product."""
    side = sizes.matmul_side
    if dtype == "fp8":
        call = _fp8_product(calls, side)
    else:
        left, right = (_noise(calls, side, side, FLOATS[dtype]) for _ in range(2))
        out = torch.empty_like(left)

        def call() -> object:
            return torch.mm(left, right, out=out)

    flop = 2.0 * side**3
    with _precision("high" if dtype == "tf32" else "highest"):
        return {dtype: flop / _median_us(calls, dtype, flop, COMPUTE, call, sizes.runs)}


def _fp8_product(calls: DriverCalls, side: int) -> Callable[[], object]:
    left, right = (
        _noise(calls, side, side, torch.float32).to(torch.float8_e4m3fn) for _ in range(2)
    )
    one = torch.ones((), device=calls.device)
    return lambda: torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)


@contextmanager
def _precision(wanted: str) -> Iterator[None]:
    """Set the precision of fp32 products (`high` allows tf32) inside the context."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def attention(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """Rates of scaled dot product attention in bf16 (else fp16), forward and backward."""
    shape = sizes.attention
    dtype = FLOATS["bf16" if "bf16" in calls.card.matmul_dtypes else "fp16"]
    rows = shape.batch * shape.heads * shape.sequence
    with torch.enable_grad():
        forward, backward = attention_passes(
            lambda: _noise(calls, rows, shape.head_size, dtype).view(shape)
        )
        there, back = float(shape.forward_flop), float(shape.backward_flop)
        ahead = _median_us(calls, "attention_forward", there, COMPUTE, forward, sizes.runs)
        behind = _median_us(calls, "attention_backward", back, COMPUTE, backward, sizes.runs)
    return {"attention_forward": there / ahead, "attention_backward": back / behind}


def launch(calls: DriverCalls, sizes: Sizes) -> dict[str, float]:
    """Microseconds from one tiny kernel to the next when many are queued."""
    tiny = torch.zeros(1, device=calls.device)

    def many() -> None:
        for _ in range(sizes.launches):
            tiny.add_(1.0)

    taken = _median_us(calls, "launch", sizes.launches, COMPUTE, many, 3)
    return {"launch": taken / sizes.launches}


#: DEVICE and LINK are required for planning; the doctor also measures MORE
DEVICE: Mapping[str, Measure] = {"device memory": memory}
LINK: Mapping[str, Measure] = {"copies to and from the device": link}
MORE: Mapping[str, Measure] = {
    "copies both ways at once": both_ways,
    "kernels that read and write host memory": direct,
    "attention": attention,
    "launches of small kernels": launch,
    "making host memory known to the device": pinning,
}


def matmuls(calls: DriverCalls) -> dict[str, Measure]:
    def one(dtype: str) -> Measure:
        return lambda calls, sizes: matmul(calls, sizes, dtype)

    return {f"{dtype} matrix products": one(dtype) for dtype in calls.card.matmul_dtypes}


# --- parts ---------------------------------------------------------------------------------


def _median_us(
    calls: DriverCalls, kind: str, amount: float, stream: str, call: Callable[[], object], runs: int
) -> float:
    """Median time of one run among many that are queued, after two that do not count."""
    marks = []
    for turn in range(runs + 2):
        calls.issue(kind, amount, stream, call)
        if turn >= 1:
            marks.append(calls.mark(stream))
    taken = [calls.elapsed_us(a, b) for a, b in pairwise(marks)]
    calls.settle()
    # a run that is too short for the clock still takes time
    return max(statistics.median(taken), 1e-3)


def _copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _bytes(calls: DriverCalls, nbytes: int) -> torch.Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8, device=calls.device)


def _noise(calls: DriverCalls, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, which cost as much power as those of training: equal numbers run faster."""
    total = rows * columns
    numbers = torch.randn(min(total, NOISE_NUMBERS)).to(calls.device, dtype)
    return numbers.repeat(-(-total // numbers.numel()))[:total].view(rows, columns)
