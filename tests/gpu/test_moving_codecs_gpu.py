"""Packed moves by kernels: in Triton's interpreter, and on a GPU where there is one.

Those for a GPU are plain functions, so that a machine without pytest's plugins can run them too.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
import warm
from test_gpu_device import Bench, bench_on

from offcompile.runtime import kernels
from offcompile.runtime.device import tickets
from offcompile.runtime.device.cuda.packing import PackedHostSlot
from offcompile.runtime.device.packing import PackedSlot
from offcompile.runtime.device.streams import flat_bytes
from offcompile.runtime.moves.saved import Saved

HERE = Path(__file__).parents[1] / "support"
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.long
@pytest.mark.skipif(not kernels.has_triton(), reason="Triton is not installed")
def test_streams_give_kernels_what_the_processor_packs(tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "packing_streams_child.py")]
    done = warm.run(command, env=environment, imported=warm.LITTLE)
    assert not done.returncode, done.stderr[-3000:]
    found = dict(json.loads(line) for line in done.stdout.splitlines())
    assert len(found) == 10
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


def out_and_back(
    bench: Bench, x: torch.Tensor, tier: str, codec: str
) -> tuple[torch.Tensor, PackedHostSlot | PackedSlot]:
    lane = "d2h" if tier == "host" else "device_to_disk"
    ticket = bench.mover.start_out(x, "x", tier, lane, codec)
    bench.wait_out(ticket)
    # its memory may be used again, as by kernels of other tensors
    kept = x.clone()
    x.zero_()
    buffer, load = bench.load(ticket)
    bench.wait_load(load)
    x.copy_(kept)
    bench.settle()
    slot = tickets.find(ticket, Saved).slot
    assert isinstance(slot, PackedHostSlot | PackedSlot)
    return buffer, slot


@pytest.mark.gpu
@needs_gpu
def test_the_same_bits_come_back_packed() -> None:
    with bench_on() as bench:
        for tier in ("host", "disk"):
            for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
                for count in (1, 127, 1023, 3_000_001):
                    x = torch.randn(count, device=bench.on).relu().to(dtype)
                    buffer, slot = out_and_back(bench, x, tier, "bitmask")
                    assert torch.equal(buffer, flat_bytes(x)), (tier, dtype, count)
                    assert count < 1e6 or slot.crossed_bytes < 0.75 * x.nbytes


@pytest.mark.gpu
@needs_gpu
def test_it_packs_the_same_where_host_memory_is_out_of_reach() -> None:
    with bench_on() as bench:
        bench.device.packers.__dict__["in_place"] = False
        for tier in ("host", "disk"):
            x = torch.randn(5_000_001, device=bench.on).relu()
            buffer, slot = out_and_back(bench, x, tier, "bitmask")
            assert torch.equal(buffer, flat_bytes(x)), tier
            assert slot.crossed_bytes < 0.6 * x.nbytes
        assert bench.device.staging_bytes > 0


@pytest.mark.gpu
@needs_gpu
def test_a_stash_is_rounded_and_widened() -> None:
    with bench_on() as bench:
        x = torch.randn(1_000_003, device=bench.on).relu()
        for codec, half in (("fp16", torch.float16), ("bitmask+bf16", torch.bfloat16)):
            buffer, _ = out_and_back(bench, x, "host", codec)
            assert torch.equal(buffer.view(torch.float32), x.to(half).float()), codec
