"""One of two ranks that train one model (`ranks.py`), held against the plain backend.

`python -m trust.ranks_child RANK STORE CASES`, run in tests/, prints a line of JSON for each case;
CASES is JSON, too: how the model is wrapped → budgets.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from weights_runs import on_host, seeded

import offcompile

WORLD, WIDTH, STEPS = 2, 192, 3
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
Wrap = Callable[[nn.Module], nn.Module]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).clone()


def in_parallel(model: nn.Module) -> nn.Module:
    """More than one bucket, so that DDPOptimizer cuts the graph."""
    return DistributedDataParallel(model, bucket_cap_mb=1)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPS: dict[str, Wrap] = {"DDP": in_parallel, "FSDP2": sharded}


def trained(wrap: Wrap, memory: str | None, rank: int) -> tuple[list[Tensor], set[str]]:
    """Losses, and weights at the end; which weights were on the host."""
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": "aot_eager"}
    if memory is not None:
        how = {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}
    model = seeded(Stack)
    forward = torch.compile(wrap(model), **how)
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2), []
    for step in range(STEPS):
        mine = torch.Generator().manual_seed(10 * step + rank)
        loss = forward(torch.randn(64, WIDTH, generator=mine)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    hosted = set() if wrap is sharded else on_host(model)
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [*seen, *(p.detach().clone() for p in whole)], hosted


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    freeze_imports()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    assert torch._dynamo.config.optimize_ddp is True
    for name, memories in json.loads(sys.argv[3]).items():
        expected, _ = trained(WRAPS[name], None, rank)
        for memory in memories:
            sent, known = offcompile.counters()["bytes_out"], len(offcompile.reports())
            values, hosted = trained(WRAPS[name], memory, rank)
            reports = offcompile.reports()[known:]
            found = {
                "case": f"{name} at {memory}",
                "equal": all(map(torch.equal, values, expected)),
                "hosted": sorted(hosted),
                "bytes_out": offcompile.counters()["bytes_out"] - sent,
                "moves": sum(len(r.plan.moves) for r in reports),
                "changed": sum(not r.fits for r in reports),
            }
            print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
