"""One of two ranks that trains a GPT of 4 M weights in a budget, whose memory the system measures.

`python rank_peaks_child.py RANK STORE CASES` prints a line of JSON per case: [wrap, budget].
Wraps: ddp_parts (as DDPOptimizer cuts the graph), ddp_whole (as one graph), ddp_sharded (as one,
with states of the optimizer shared out), fsdp (each block).
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from weights_child import Anonymous
from zoo import GPT

import offcompile
from offcompile.optim import AdamW
from offcompile.run.accounts.process import process
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap

WORLD, STEPS, WORDS, LENGTH = 2, 3, 1000, 128


def anonymous_bytes() -> int:
    """Private memory without garbage and free blocks."""
    gc.collect()
    heap().trim()
    return memory.resident().anon_bytes


def train(wrap: str, budget: str, rank: int, width: int, depth: int, rows: int) -> dict[str, int]:
    """Returns bytes of private memory that were not there before: at most, in all steps but the
    first, which compiles; and what stays beside tensors, which is what compiling has left."""
    torch._dynamo.reset()
    torch._dynamo.config.optimize_ddp = wrap == "ddp_parts"
    before = anonymous_bytes()
    torch.manual_seed(0)
    model = GPT(WORDS, width, depth, 4, LENGTH)
    options = {"memory": budget, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
    how: dict[str, Any] = {"backend": "offcompile", "options": options}
    if wrap == "fsdp":
        mesh = init_device_mesh("cpu", (WORLD,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        forward: nn.Module = torch.compile(model, **how)
    else:
        forward = DistributedDataParallel(torch.compile(model, **how))
    if wrap == "ddp_sharded":
        weights = model.parameters()
        optimizer: Any = AdamW(weights, 1e-3, states="host", overlap=True, sharded=True)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(number: int) -> None:
        mine = torch.Generator().manual_seed(10 * number + rank)
        forward(torch.randint(0, WORDS, (rows, LENGTH + 1), generator=mine)).backward()
        optimizer.step()
        optimizer.zero_grad()

    step(0)
    with Anonymous() as watched:
        for number in range(1, STEPS):
            step(number)
    locals_of = (getattr(p, "to_local", lambda p=p: p)() for p in model.parameters())
    tensors = sum(p.nbytes for p in locals_of)
    if wrap != "fsdp":
        tensors += process.usage_of(torch.device("cpu")).ranks.held_bytes(())
    left = anonymous_bytes() - before - tensors
    return {"peak_bytes": watched.peak_bytes - before, "left_bytes": left}


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    freeze_imports()
    return_freed_memory()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for wrap, budget in json.loads(sys.argv[3]):
        train(wrap, "minimum", rank, 32, 1, 1)  # brings in code, threads and caches
        known = len(offcompile.reports())
        found: dict[str, Any] = train(wrap, budget, rank, 256, 4, 8)
        found["changed"] = sum(not r.fits for r in offcompile.reports()[known:])
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
