"""One of two ranks, of which rank 1 has too small a budget: both are to raise the same error. Or it
has a graph of its own ("differ").

`python rank_refusal_child.py RANK STORE CASES` prints a line of JSON per case: how the model is
wrapped, and the error. A rank that trained on would wait in the other's collective until the end.
"""

from __future__ import annotations

import json
import sys
from unittest import mock

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import offcompile
from offcompile.run.ranks import agreement

WORLD, WIDTH = 2, 64


class Mlp(nn.Module):  # a forward of its own: Dynamo skips those of torch's modules
    def __init__(self, odd: bool = False) -> None:
        super().__init__()
        self.odd = odd
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        return self.down(torch.sigmoid(y) if self.odd else torch.relu(y)).sum()


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


def differ(rank: int) -> dict[str, object]:
    """Ranks with graphs of their own are told so once, and train on."""
    torch._dynamo.reset()
    model = Mlp(odd=rank == 1)
    options = {"memory": "1GiB", "lowering": "aot_eager", "seconds": 0.05}
    ddp = DistributedDataParallel(torch.compile(model, backend="offcompile", options=options))
    said: list[str] = []
    with (
        mock.patch.object(agreement, "LONGEST_S", 5.0),
        mock.patch.object(agreement, "warn", said.append),
    ):
        for _ in range(2):
            ddp(torch.ones(32, WIDTH)).backward()
    gradients = [p.grad.tolist() for p in model.parameters() if p.grad is not None]
    return {"said": said, "gradients": gradients}


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    freeze_imports()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for wrap in json.loads(sys.argv[3]):
        found = differ(rank) if wrap == "differ" else refused(wrap, rank)
        print(json.dumps({"wrap": wrap, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
