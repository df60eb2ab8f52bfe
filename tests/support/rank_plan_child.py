"""One of two ranks that plan together, with budgets of their own; costs of ops are measured.

`python rank_plan_child.py RANK STORE CASES` prints a line of JSON per case: how the model is
wrapped, and the budget of each rank.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_child import build
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from weights_runs import seeded

import offcompile
from offcompile.ir.jsonio import plan_to_json
from offcompile.run.plan import together

WORLD, STEPS = 2, 3
WORDS, LENGTH = 96, 32


def trained(wrap: str, memory: str | None, rank: int) -> list[Tensor]:
    """Losses, and weights at the end."""
    torch._dynamo.reset()
    how: dict[str, Any] = {"backend": "aot_eager"}
    if memory is not None:
        options = {"memory": memory, "lowering": "aot_eager", "seconds": 0.1}
        how = {"backend": "offcompile", "options": options}
    model: nn.Module = seeded(build)
    if wrap == "ddp":
        forward: Any = DistributedDataParallel(torch.compile(model, **how))
    else:
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (WORLD,)))
        forward = fully_shard(model, mesh=init_device_mesh("cpu", (WORLD,)))
        forward.compile(**how)
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2, fused=True), []
    for step in range(STEPS):
        mine = torch.Generator().manual_seed(100 * step + rank)
        loss = forward(torch.randint(0, WORDS, (4, LENGTH + 1), generator=mine))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach().clone())
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [*seen, *(p.detach().clone() for p in whole)]


def found(wrap: str, memories: list[str], rank: int) -> dict[str, Any]:
    expected, known = trained(wrap, None, rank), len(offcompile.reports())
    searched, said = 0, []
    best = together.best_candidate

    def counted(*given: Any) -> Any:
        nonlocal searched
        searched += 1
        return best(*given)

    with (
        mock.patch.object(together, "best_candidate", counted),
        mock.patch.object(together, "warn", said.append),
    ):
        values = trained(wrap, memories[rank], rank)
    reports = offcompile.reports()[known:]
    return {
        "wrap": wrap,
        "equal": len(values) == len(expected) and all(map(torch.equal, values, expected)),
        "plans": [plan_to_json(r.plan) for r in reports],
        "planned_us": [r.planned_us for r in reports],
        "budgets": [r.budget_bytes for r in reports],
        "searched": searched,
        "names": [f"{r.name} {r.memory.beside_bytes}" for r in reports],
        "said": said,
    }


def main() -> None:
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], WORLD)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    for wrap, memories in json.loads(sys.argv[3]):
        print(json.dumps(found(wrap, memories, rank)), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
