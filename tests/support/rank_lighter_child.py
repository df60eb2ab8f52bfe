"""One of two ranks under DDP whose model is compiled block by block. Rank 0 alone has its graphs
save less for backward in the middle of training.

`python rank_lighter_child.py RANK STORE SPILL` prints a line of JSON: if losses and weights are
those of plain DDP, and how many plans run ops again.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports
from mlp_block import WIDTH, Block
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import offcompile
from offcompile.graph.costs import op_costs
from offcompile.machine import target
from offcompile.machine.hardware import HardwareProfile
from offcompile.passes import turnover
from offcompile.run.accounts import step_plan

WORLD, LAYERS, BATCH, LENGTH, STEPS, MIB = 2, 6, 4, 256, 16, 1 << 20
SLOW = HardwareProfile(
    "cpu", "cpu", None, 10.0, 2.0, 2.0, "made up", {"fp32": 0.001}, latency_us=20.0
)


def trained(spill: str | None, rank: int) -> list[Tensor]:
    """The losses of all steps, and the weights at the end; plain without `spill`."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(LAYERS)))
    options = {"memory": 10 * MIB, "lowering": "aot_eager", "spill": spill, "seconds": 0.1}
    how = {"backend": "offcompile", "options": options} if spill else {"backend": "aot_eager"}
    for block in model:
        block.compile(**how)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(STEPS):
        mine = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(BATCH, LENGTH, WIDTH, generator=mine).requires_grad_()
        loss = ddp(x).square().mean()
        loss.backward()
        seen.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(p.detach().clone() for p in model.parameters())]


def decide_without_the_clock(rank: int) -> None:
    target._measured = lambda directories, progress: SLOW
    op_costs.WORTH_MEASURING_US = float("inf")
    turnover.PRICES = (1.0,)
    step_plan.LIGHTER_GAIN = -1.0 if rank == 0 else 1.0
    step_plan.LOSES = float("inf")


def main() -> None:
    rank, spill = int(sys.argv[1]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    freeze_imports()
    store = dist.FileStore(sys.argv[2], WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    decide_without_the_clock(rank)
    plain, ours = trained(None, rank), trained(spill, rank)
    print(
        json.dumps(
            {
                "equal": len(ours) == len(plain) and all(map(torch.equal, ours, plain)),
                "run_again": sum(bool(r.plan.recomputes) for r in offcompile.reports()),
                "bytes_out": offcompile.counters()["bytes_out"],
            }
        ),
        flush=True,
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
