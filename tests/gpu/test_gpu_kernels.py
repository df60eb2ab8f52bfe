"""Kernels on a real GPU: all cases, host memory in place, streams, beyond 31 bits, and rates.

`python tests/support/kernel_cases.py cuda` runs the cases where pytest is not to be had.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from kernel_cases import CASES, assert_same, random_bits

from offcompile.runtime import kernels
from offcompile.runtime.kernels import CANDIDATES, Config, Launch
from offcompile.runtime.memory.alias import cuda_alias
from offcompile.runtime.memory.host_arena import HostArena

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not kernels.has_triton(), reason="Triton is not installed"),
]

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("name", CASES)
def test_a_kernel_does_what_torch_does(name: str) -> None:
    CASES[name](device())


def test_kernels_run_here() -> None:
    assert kernels.why_not(device(), torch.float32, torch.float16, torch.bfloat16) is None


def test_host_memory_is_read_and_written_in_place() -> None:
    arena = HostArena(64 * MIB, 64 * MIB)
    block, back = arena.block(4 * MIB), arena.block(8 * MIB)
    shape = (1024, 2048)
    values = random_bits(torch.bfloat16, shape, "host")
    block.tensor.copy_(values.view(-1).view(torch.uint8))
    source = cuda_alias(block, device(), torch.bfloat16, shape)
    onto = torch.empty(shape, device=device())
    kernels.copy_into(onto, source)
    assert_same(onto, values.float(), exactly=False)
    written = cuda_alias(back, device(), torch.float32, shape)
    kernels.copy_into(written, onto)
    torch.cuda.synchronize()
    on_host = back.tensor.view(torch.float32).view(shape)
    assert_same(on_host, values.float(), exactly=False)
    indices = torch.randint(0, 1024, (300,))
    rows = kernels.gather_rows(source, indices.to(device()), torch.float32)
    assert_same(rows, values[indices].float(), exactly=False)
    # rows with a pitch, on the host side
    half = torch.empty(1024, 1024, dtype=torch.bfloat16, device=device())
    kernels.copy_into(half, source[:, :1024])
    assert_same(half, values[:, :1024].contiguous(), exactly=True)
    del source, written
    arena.close()


def test_a_kernel_runs_on_the_current_stream() -> None:
    # a stream that captures runs nothing: what was queued elsewhere shows at once
    source = torch.ones(MIB, device=device())
    target = torch.zeros(MIB, device=device(), dtype=torch.bfloat16)
    kernels.copy_into(target, source)  # compiled now, so that the next call only queues
    target.zero_()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    # relaxed: a kernel on another stream is then no error, and must not go unseen
    with torch.cuda.graph(graph, stream=side, capture_error_mode="relaxed"):
        kernels.copy_into(target, source)
    torch.cuda.synchronize()
    assert not target.any(), "the copy ran beside the stream that it was given"
    graph.replay()
    torch.cuda.synchronize()
    assert bool((target == 1).all())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_kernel_runs_where_its_tensors_are() -> None:
    other = torch.device("cuda", 1)
    source = torch.arange(1000.0, device=other)
    target = torch.zeros(1000, device=other, dtype=torch.float16)
    with torch.cuda.device(0):
        kernels.copy_into(target, source)
        found = kernels.gather_rows(source.view(10, 100), torch.tensor([3], device=other))
    torch.cuda.synchronize(other)
    assert torch.equal(target, source.half())
    assert torch.equal(found[0], source[300:400])


def test_a_bad_index_stops_the_kernel() -> None:
    # in a process of its own: the device cannot be used after it
    script = (
        "import torch\nfrom offcompile.runtime import kernels\n"
        "table = torch.zeros(4, 8, device='cuda')\n"
        "kernels.gather_rows(table, torch.tensor([0, 4], device='cuda'))\n"
        "torch.cuda.synchronize()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode != 0
    assert "assert" in done.stderr


def test_offsets_beyond_31_bits() -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    length = 2**31 + 4099  # odd, so that elements are single bytes
    if free_bytes < 3 * length:
        pytest.skip(f"needs {3 * length >> 30} GiB of device memory, {free_bytes >> 30} are free")
    source = torch.zeros(length, dtype=torch.uint8, device=device())
    source[-4099:] = random_bits(torch.uint8, (4099,), "end").to(device())
    target = torch.ones_like(source)
    kernels.copy_launch(target, source).run()
    assert torch.equal(target, source)
    # three rows, the last of which begins beyond
    pitch = 2**30 + 1
    rows = source.as_strided((3, 4095), (pitch, 1))
    found = kernels.gather_rows(rows, torch.tensor([2, 0], device=device()))
    assert torch.equal(found, rows[torch.tensor([2, 0], device=device())])
    target.fill_(1)
    kernels.copy_launch(target.as_strided((3, 4095), (pitch, 1)), rows).run()
    assert torch.equal(target.as_strided((3, 4095), (pitch, 1)), rows)


def rates_of_kernels(arena: HostArena) -> tuple[list[str], dict[str, float]]:
    """Lines to print, and the best rate of each kind of move."""
    nbytes, row = 256 * MIB, 1024
    block = arena.block(nbytes)
    block.tensor.zero_()
    length = nbytes // 4
    host = cuda_alias(block, device(), torch.float32, (length,))
    here, there = torch.zeros(length, device=device()), torch.zeros(length, device=device())
    narrow = torch.zeros(length, device=device(), dtype=torch.bfloat16)
    host_rows, here_rows = host.view(-1, row), here.view(-1, row)
    indices = torch.randperm(length // row)[: length // row // 2].to(device())
    picked = torch.empty(len(indices), row, device=device())
    part = slice(0, row // 8)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[Config], Launch]:
        return lambda config: kernels.copy_launch(target, source, config)

    def gather(config: Config) -> Launch:
        return kernels.gather_launch(picked, host_rows, indices, config)

    measured = (
        ("device to device", copy(there, here), 2 * nbytes),
        ("host to device", copy(here, host), nbytes),
        ("device to host", copy(host, here), nbytes),
        ("host float32 to device bfloat16", copy(narrow, host), nbytes),
        ("device bfloat16 to host float32", copy(host, narrow), nbytes),
        ("rows of 512 B, 4 KiB apart", copy(here_rows[:, part], host_rows[:, part]), nbytes // 8),
        ("gather of rows of 4 KiB", gather, picked.nbytes),
    )
    told: list[str] = []
    best: dict[str, float] = {}
    for name, launch, moved in measured:
        for config in CANDIDATES:
            for most in (None, 64, 16):
                run = partial(launch(config).run, most)
                found = moved / kernels.device_time_us(run, device()) / 1e3
                best[name] = max(best.get(name, 0.0), found)
                told.append(f"{name:34} {config.tile_bytes:6} B {most or 'all':>4} {found:8.1f}")
    pinned = block.tensor.view(torch.float32)
    for name, target, source in (
        ("host to device", here, pinned),
        ("device to host", pinned, here),
    ):
        engine = partial(target.copy_, source, non_blocking=True)
        found = nbytes / kernels.device_time_us(engine, device()) / 1e3
        told.append(f"{name:34} copy engine   {found:8.1f}")
    return told, best


def test_rates_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints GB/s of useful bytes on the bus (in device memory: read and written)."""
    arena = HostArena(512 * MIB, 256 * MIB)
    told, best = rates_of_kernels(arena)
    with capsys.disabled():
        print("\nGB/s              (tile, most programs)\n" + "\n".join(told))
    assert len(best) == 7
    assert all(found > 0 for found in best.values())
    arena.close()
