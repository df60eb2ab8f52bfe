"""Host memory and a real GPU: registered, copied beside compute, accessed in place, let go.

Plain functions without fixtures, so that a machine without pytest's plugins can run them too.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.memory import pinning
from offcompile.runtime.memory.alias import _by_dlpack, _by_interface, check_alias, cuda_alias
from offcompile.runtime.memory.host_arena import HostArena, HostFull

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

MIB = 1 << 20
ROOT = Path(__file__).parents[2]
SUCCESS = 0


def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def strict_arena(limit_bytes: int, ready_bytes: int = 0) -> HostArena:
    """An arena that must be pinned: the warning of the fallback is an error here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena = HostArena(limit_bytes, ready_bytes)
    assert arena.pinned
    return arena


def test_registering_works_and_torch_sees_pinned_memory() -> None:
    arena = strict_arena(64 * MIB, 64 * MIB)
    block = arena.block(3 * MIB + 5)
    assert block.pinned
    assert block.tensor.is_pinned()
    assert block.tensor[7:9].is_pinned()
    assert not torch.zeros(64, dtype=torch.uint8).is_pinned()
    address = block.address
    block.free()
    arena.close()
    assert not pinning.is_registered(address, 1)


def test_copies_through_it_are_exact_in_both_directions() -> None:
    arena = strict_arena(64 * MIB, 64 * MIB)
    there, back = arena.block(16 * MIB), arena.block(16 * MIB)
    source = torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8, device=device())
    there.tensor.copy_(source, non_blocking=True)
    onto = torch.empty_like(source)
    onto.copy_(there.tensor, non_blocking=True)
    back.tensor.copy_(onto, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.tensor, source.cpu())
    assert torch.equal(back.tensor, source.cpu())
    del there, back
    arena.close()


def test_a_copy_is_issued_without_waiting_and_runs_beside_compute() -> None:
    # a copy of pageable memory would hold the caller until compute, queued before it, is over
    arena = strict_arena(512 * MIB, 512 * MIB)
    block = arena.block(512 * MIB)
    target = torch.empty(512 * MIB, dtype=torch.uint8, device=device())
    compute, copies = torch.cuda.current_stream(), torch.cuda.Stream()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
    target.copy_(block.tensor, non_blocking=True)
    torch.cuda.synchronize()
    marks[0].record(compute)
    torch.cuda._sleep(400_000_000)
    marks[1].record(compute)
    with torch.cuda.stream(copies):
        marks[2].record(copies)
        target.copy_(block.tensor, non_blocking=True)
        marks[3].record(copies)
    issued_during_compute = not marks[1].query()
    torch.cuda.synchronize()
    assert issued_during_compute
    # by the device's own clock: the copy ended before compute did
    assert marks[3].elapsed_time(marks[1]) > 0
    del block
    arena.close()


def test_several_segments_are_all_registered_and_all_let_go() -> None:
    arena = strict_arena(2048 * MIB)
    blocks = [arena.block(200 * MIB) for _ in range(4)]
    assert arena.capacity_bytes == 1024 * MIB
    addresses = [block.address for block in blocks]
    for value, block in enumerate(blocks, start=1):
        assert block.tensor.is_pinned()
        cuda_alias(block, device(), torch.uint8, (block.nbytes,)).fill_(value)
    torch.cuda.synchronize()
    for value, block in enumerate(blocks, start=1):
        assert bool((block.tensor == value).all())
    del block
    blocks.clear()
    arena.close()
    cudart = torch.cuda.cudart()
    for address in addresses:
        assert int(cudart.cudaHostUnregister(address)) != SUCCESS
    pinning._forget_last_error()
    # and the next kernel is not blamed for it
    assert torch.ones(4, device=device()).sum().item() == 4


def test_both_sides_see_what_the_other_one_writes() -> None:
    check_alias(device())
    check_alias(device())


def test_each_of_the_two_ways_makes_an_alias() -> None:
    arena = strict_arena(MIB, MIB)
    block = arena.block(4096)
    for way in (_by_interface, _by_dlpack):
        alias = way(block.tensor, block.address, 4096, device())
        assert (alias.device, alias.data_ptr()) == (device(), block.address)
        block.tensor.fill_(3)
        assert alias.sum(dtype=torch.int64).item() == 3 * 4096
        alias.add_(4)
        torch.cuda.synchronize()
        assert block.tensor.tolist() == [7] * 4096
        del alias
    del block
    assert arena.used_bytes == 0
    arena.close()


def test_kernels_read_and_write_host_memory_in_place() -> None:
    arena = strict_arena(256 * MIB, 256 * MIB)
    block = arena.block(128 * MIB)
    floats = block.tensor.view(torch.float32)
    floats.copy_(torch.randn(floats.numel()))
    before = torch.cuda.memory_allocated()
    rows = cuda_alias(block, device(), torch.float32, (8192, 4096))
    # the alias itself takes nothing of the device
    assert torch.cuda.memory_allocated() == before
    picked = torch.tensor([5, 0, 8191, 77], device=device())
    expected = floats.view(8192, 4096)
    assert torch.equal(rows.index_select(0, picked).cpu(), expected[picked.cpu()])
    x = torch.randn(16, 8192, device=device())
    product = x @ rows
    reference = x @ expected.to(device())
    torch.testing.assert_close(product, reference, rtol=1e-3, atol=1e-2)
    transposed = cuda_alias(block, device(), torch.float32, (4096, 8192), (1, 4096))
    assert torch.equal(transposed[17].cpu(), expected[:, 17])
    # written in place by a kernel, and by one that converts
    torch.mul(rows, 2.0, out=rows)
    torch.cuda.synchronize()
    assert torch.equal(floats.view(8192, 4096)[3], rows[3].cpu())
    copied = rows.clone()
    assert copied.data_ptr() != rows.data_ptr()
    assert torch.equal(copied.cpu(), floats.view(8192, 4096))
    del rows, transposed, floats, expected, block
    assert arena.used_bytes == 0
    arena.close()


def test_what_has_no_elements_lies_on_the_device() -> None:
    alias = cuda_alias(torch.empty(0, dtype=torch.uint8), device(), torch.bfloat16, (0, 4))
    assert (alias.device, tuple(alias.shape), alias.dtype) == (device(), (0, 4), torch.bfloat16)


def test_unpinned_memory_is_refused() -> None:
    with pytest.raises(OffloadError, match="not in a pinned arena"):
        cuda_alias(torch.zeros(64, dtype=torch.uint8), device(), torch.uint8, (64,))


def test_an_alias_keeps_block_registration_and_memory_past_block_and_arena() -> None:
    arena = strict_arena(4 * MIB, 4 * MIB)
    block = arena.block(2 * MIB)
    address = block.address
    alias = cuda_alias(block, device(), torch.int32, (MIB // 2,))
    block.free()
    del block
    other = arena.block(2 * MIB)
    assert other.address != address
    other.tensor.fill_(255)
    try:
        arena.block(2 * MIB)
        raise AssertionError("memory of a living alias was handed out")
    except HostFull:
        pass
    arena.close()
    del arena, other
    gc.collect()
    pinning.sweep()
    alias.fill_(11)
    assert alias.sum(dtype=torch.int64).item() == 11 * alias.numel()
    assert pinning.is_registered(address, 2 * MIB)
    del alias
    pinning.sweep()
    assert not pinning.is_registered(address, 1)


def test_an_alias_in_autograd_trains_like_a_weight_on_the_device() -> None:
    arena = strict_arena(MIB, MIB)
    block = arena.block(64 * 64 * 4)
    block.tensor.view(torch.float32).copy_(torch.randn(64 * 64))
    shadow = cuda_alias(block, device(), torch.float32, (64, 64))
    resident = shadow.clone().requires_grad_()
    weight = torch.nn.Parameter(shadow)
    x = torch.randn(8, 64, device=device())
    for each in (weight, resident):
        (x @ each).square().sum().backward()
    assert weight.grad is not None and resident.grad is not None
    torch.testing.assert_close(weight.grad, resident.grad)
    assert weight.data_ptr() == block.address
    del shadow, weight, each, block
    gc.collect()
    assert arena.used_bytes == 0
    arena.close()


def test_refused_registrations_do_not_spoil_the_next_kernel() -> None:
    # an address that is no memory of this process
    code = pinning.CudaRegistrar().register(1 << 46, 4096)
    assert code != SUCCESS
    total = torch.ones(16, device=device()).sum()
    torch.cuda.synchronize()
    assert total.item() == 16


EXIT = """
import atexit, sys
import torch

def last():
    # runs after everything that was registered later
    cudart = torch.cuda.cudart()
    codes = [int(cudart.cudaHostUnregister(address)) for address in addresses]
    print(*codes, flush=True)

addresses = []
atexit.register(last)
from offcompile.runtime.memory.alias import cuda_alias
from offcompile.runtime.memory.host_arena import HostArena

arena = HostArena(1 << 30)
blocks = [arena.block(200 << 20), arena.block(200 << 20)]
assert arena.pinned
addresses += [block.address for block in blocks]
alias = cuda_alias(blocks[0], torch.device("cuda", 0), torch.uint8, (200 << 20,))
# still running when the interpreter ends
for _ in range(20):
    alias.add_(1)
torch.cuda._sleep(200_000_000)
"""


def test_at_exit_the_device_is_waited_for_and_everything_unregistered() -> None:
    done = subprocess.run(
        [sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    # CUDA knows neither of them any more
    codes = [int(code) for code in done.stdout.split()]
    assert len(codes) == 2
    assert SUCCESS not in codes


FORK = """
import os, torch
from offcompile.runtime.memory.host_arena import HostArena
arena = HostArena(1 << 30, 256 << 20)
block = arena.block(1 << 20)
block.tensor.fill_(4)
child = os.fork()
if not child:
    arena.close()
    del block, arena
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
# written after the fork, read by the device: the pages are still the same
block.tensor.fill_(9)
print(block.tensor.to("cuda", non_blocking=True).sum(dtype=torch.int64).item() == 9 << 20)
"""


def test_a_fork_leaves_the_pages_that_the_device_reads() -> None:
    done = subprocess.run(
        # newer Pythons warn of every fork beside threads, which CUDA always has
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", FORK],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")


def rate_gbps(copy: Callable[[], object], nbytes: int) -> float:
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        copy()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return nbytes / statistics.median(times) / 1e6


def test_rates_are_printed() -> None:
    arena = strict_arena(512 * MIB, 512 * MIB)
    block = arena.block(512 * MIB)
    resident = torch.zeros(512 * MIB, dtype=torch.uint8, device=device())
    alias = cuda_alias(block, device(), torch.uint8, (512 * MIB,))
    pageable = torch.zeros(512 * MIB, dtype=torch.uint8)
    ways: dict[str, Callable[[], object]] = {
        "pinned to device": lambda: resident.copy_(block.tensor, non_blocking=True),
        "device to pinned": lambda: block.tensor.copy_(resident, non_blocking=True),
        "pageable to device": lambda: resident.copy_(pageable),
        "kernel reads alias": lambda: torch.bitwise_or(alias, 0, out=resident),
        "kernel writes alias": lambda: torch.bitwise_or(resident, 0, out=alias),
        "copy_ from alias": lambda: resident.copy_(alias),
    }
    rates = {name: rate_gbps(copy, 512 * MIB) for name, copy in ways.items()}
    for name, rate in rates.items():
        print(f"{name}: {rate:.1f} GB/s")
    assert all(rate > 0 for rate in rates.values())
