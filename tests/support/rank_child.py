"""One of several ranks that trains every cell it is given, each beside its twin under `aot_eager`.

`python rank_child.py RANK STORE ASKED` prints a line of JSON per cell; ASKED is JSON, too: the
number of ranks, and fields of `rank_cells.Cell` for each cell.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from freeze_imports import freeze_imports
from rank_cells import Cell
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from weights_runs import on_host, seeded
from zoo import GPT

import offcompile
from offcompile.optim import AdamW

STEPS, MAX_NORM = 3, 0.5
WORDS, LENGTH = 96, 32
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}


def build() -> nn.Module:
    return GPT(WORDS, 128, 2, 4, LENGTH)


def how(memory: str | None) -> dict[str, Any]:
    if memory is None:
        return {"backend": "aot_eager"}
    return {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}


def wrapped(model: nn.Module, cell: Cell) -> nn.Module:
    settings = dict(cell.settings)
    if cell.wrap == "ddp":
        return DistributedDataParallel(model, **settings)
    if "mp_policy" in settings:
        half = getattr(torch, settings["mp_policy"])
        settings["mp_policy"] = MixedPrecisionPolicy(half, torch.float32)
    if "offload_policy" in settings:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    settings["mesh"] = init_device_mesh("cpu", (dist.get_world_size(),))
    if cell.wrap == "fsdp":
        for block in model.blocks:
            fully_shard(block, **settings)
    return fully_shard(model, **settings)


def prepared(cell: Cell, memory: str | None) -> tuple[nn.Module, Any, Any]:
    """The model, what is called, and what has `no_sync`."""
    model = seeded(build)
    inner: Any = model
    if cell.order == "blocks":
        for block in model.blocks:
            block.compile(**how(memory))
    if cell.order == "inside":
        if cell.wrap == "ddp":
            inner = torch.compile(model, **how(memory))
        else:
            model.compile(**how(memory))
    outer = wrapped(inner, cell)
    if cell.order == "blocks_after":
        for block in model.blocks:
            block.compile(**how(memory))
    forward = torch.compile(outer, **how(memory)) if cell.order == "whole" else outer
    return model, forward, outer


def optimizer_for(cell: Cell, model: nn.Module, ours: bool) -> torch.optim.Optimizer:
    if not ours or cell.optimizer in ("torch", "clipped"):
        return torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    overlap, clips = cell.optimizer.startswith("overlap"), cell.optimizer.endswith("max_norm")
    passes = 1 if cell.steps == "plain" else 2
    return AdamW(
        model.parameters(),
        1e-2,
        overlap=overlap,
        accumulate=passes if overlap else 1,
        max_norm=MAX_NORM if clips else None,
        sharded="sharded" in cell.optimizer,
    )


@contextlib.contextmanager
def quiet(outer: Any, cell: Cell, last: bool) -> Iterator[None]:
    if cell.steps != "no_sync" or last:
        yield
    elif cell.wrap == "ddp":
        with outer.no_sync():
            yield
    else:
        outer.set_requires_gradient_sync(False)
        yield
        outer.set_requires_gradient_sync(True)


def trained(cell: Cell, memory: str | None, rank: int) -> tuple[list[Tensor], set[str]]:
    """Losses of all steps, and weights at the end; which weights were on the host."""
    torch._dynamo.reset()
    model, forward, outer = prepared(cell, memory)
    ours = memory is not None
    optimizer = optimizer_for(cell, model, ours)
    clips = cell.optimizer == "clipped" or (cell.optimizer.endswith("max_norm") and not ours)
    passes, seen = 1 if cell.steps == "plain" else 2, []
    for step in range(STEPS):
        for part in range(passes):
            mine = torch.Generator().manual_seed(100 * step + 10 * part + rank)
            with quiet(outer, cell, part == passes - 1):
                loss = forward(torch.randint(0, WORDS, (4, LENGTH + 1), generator=mine))
                loss.backward()
            seen.append(loss.detach().clone())
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    hosted = set() if cell.wrap != "ddp" else on_host(model)
    whole = (getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters())
    return [*seen, *(p.detach().clone() for p in whole)], hosted


def twin_of(cell: Cell) -> Cell:
    """Return the settings that the plain run of a cell depends on."""
    clips = cell.optimizer == "clipped" or cell.optimizer.endswith("max_norm")
    return replace(cell, memory="", optimizer="clipped" if clips else "torch")


def found(cell: Cell, expected: list[Tensor], rank: int) -> dict[str, Any]:
    sent, known = offcompile.counters()["bytes_out"], len(offcompile.reports())
    values, hosted = trained(cell, cell.memory, rank)
    reports = offcompile.reports()[known:]
    return {
        "equal": len(values) == len(expected) and all(map(torch.equal, values, expected)),
        "hosted": sorted(hosted),
        "bytes_out": offcompile.counters()["bytes_out"] - sent,
        "planned": len(reports),
        "changed": sum(not r.fits for r in reports),
    }


def main() -> None:
    world, cells = json.loads(sys.argv[3])
    rank, store = int(sys.argv[1]), dist.FileStore(sys.argv[2], world)
    torch.set_num_threads(1)
    freeze_imports()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    twins: dict[str, list[Tensor]] = {}
    for fields in cells:
        cell = Cell(**fields)
        said: dict[str, Any] = {"cell": cell.name, "error": None}
        try:
            twin = twin_of(cell)
            if twin.name not in twins:
                twins[twin.name], _ = trained(twin, None, rank)
            said |= found(cell, twins[twin.name], rank)
        except Exception as error:  # told: a cell may be one that is refused
            said["error"] = f"{type(error).__name__}: {error}"[:1500]
            if "RANK_TRACES" in os.environ:
                traceback.print_exc()
        print(json.dumps(said), flush=True)
        gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
