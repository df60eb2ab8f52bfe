"""Measures sharded states on one of the ranks of `benchmarks.sharded`."""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import offcompile
from benchmarks.activations_child import Case, gpt

BATCH, LENGTH, WARM = 1, 256, 3


class Run:
    """One model with its optimizer, warmed up."""

    def __init__(self, case: Case, task: dict[str, Any], **how: Any) -> None:
        torch.manual_seed(0)
        self.case, model = case, case.build()
        self.weight_bytes = sum(p.nbytes for p in model.parameters())
        # both models of a row are in this process, and share a budget
        options: dict[str, Any] = {"memory": "minimum", "lowering": "aot_eager", "seconds": 2}
        options["spill"] = task["spill"]
        inner: Any = torch.compile(model, backend="offcompile", options=options)
        self.forward = DistributedDataParallel(inner)
        self.optimizer = offcompile.optim.AdamW(
            model.parameters(), 1e-4, directory=task["folder"], **how
        )
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.losses: list[float] = []
        self.seconds: list[float] = []
        for _ in range(WARM):
            self.step()
        self.seconds.clear()
        self.optimizer.settle()
        stores = self.optimizer.facts().stores.values()
        self.state_bytes = sum(s.host_bytes + s.disk_bytes for s in stores)

    def step(self) -> None:
        inputs = self.case.batch(self.random)
        dist.barrier()
        began = time.perf_counter()
        loss = self.forward(*inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(float(loss.detach()))


def measured(task: dict[str, Any], how: dict[str, Any]) -> dict[str, Any]:
    case = gpt(task["width"], task["layers"], BATCH, LENGTH, 0.0)
    torch._dynamo.reset()
    plain, sharded = Run(case, task, **how), Run(case, task, sharded=True, **how)
    for turn in range(task["rounds"]):
        for one in (plain, sharded) if turn % 2 == 0 else (sharded, plain):
            one.step()
    return {
        "title": case.title,
        "weight_bytes": plain.weight_bytes,
        "whole_bytes": plain.state_bytes,
        "share_bytes": sharded.state_bytes,
        "plain": plain.seconds,
        "sharded": sharded.seconds,
        "equal": plain.losses == sharded.losses,
    }


def main() -> None:
    rank, task = int(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    distributed: Any = dist
    store = distributed.FileStore(f"{task['folder']}/store", task["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=task["world"])
    for name, how in task["rows"].items():
        print(f"  {name}", file=sys.stderr, flush=True)
        print(json.dumps(measured(task, how)), flush=True)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
