"""One of two ranks, of which rank 1 has too small a budget: both are to raise the same error.

`python rank_refusal_child.py RANK STORE CASES` prints a line of JSON per case: how the model is
wrapped, and the error. A rank that trained on would wait in the other's collective until the end.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offcompile

WORLD, WIDTH = 2, 64


class Mlp(nn.Module):  # a forward of its own: Dynamo skips those of torch's modules
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x))).sum()


def refused(wrap: str, rank: int) -> dict[str, object]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Mlp()
    options = {"memory": "8KiB" if rank else "1GiB", "lowering": "aot_eager", "seconds": 0.05}
    if wrap == "fsdp":
        model.compile(backend="offcompile", options=options)
        forward = fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
    else:
        inner = torch.compile(model, backend="offcompile", options=options)
        forward = DistributedDataParallel(inner if wrap == "inside" else model)
        if wrap == "whole":
            forward = torch.compile(forward, backend="offcompile", options=options)
    try:
        forward(torch.ones(32, WIDTH)).backward()
    except offcompile.Infeasible as error:
        return {"kind": type(error).__name__, "needed": error.needed_bytes, "text": str(error)}
    return {"kind": None}


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for wrap in json.loads(sys.argv[3]):
        print(json.dumps({"wrap": wrap, **refused(wrap, rank)}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
