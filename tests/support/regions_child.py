"""Trains blocks with two graph breaks between them, plainly or within a budget; prints one JSON.

A process of its own, so that its peak is that of these steps alone.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
import torch.nn.functional as F
from freeze_imports import freeze_imports
from torch import Tensor, nn

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.registry import runtimes

WIDTH, LAYERS, BATCH, LENGTH, STEPS = 192, 6, 4, 512, 8
#: steps after which the order of graphs, and the room that holes need, count as known
LEARNING_STEPS = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """The graph breaks twice, a third and two thirds of the way."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        third = len(self.blocks) // 3
        for i, block in enumerate(self.blocks):
            if i in (third, 2 * third):
                torch._dynamo.graph_break()
            x = block(x)
        return x.square().mean()


def found() -> dict[str, int]:
    """How backward found what it wanted, so far."""
    for runtime in runtimes():
        if runtime.mover.keeper is not None:
            seen = runtime.mover.keeper.foresight.counters
            return {"hits": seen.hits, "others": seen.late + seen.misses}
    return {"hits": 0, "others": 0}


def train(asked: int | str | None, width: int, layers: int, length: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, seen = Model(width, layers), []
    if asked is None:
        forward: Any = torch.compile(model, backend="aot_eager")
    else:
        options = {"memory": asked, "lowering": "aot_eager", "seconds": 0.2}
        forward = torch.compile(model, backend="offcompile", options=options)
    before, first_bytes = found(), 0
    for step in range(STEPS):
        dice = torch.Generator().manual_seed(step)
        loss = forward(torch.randn(BATCH, length, width, generator=dice))
        loss.backward()
        seen.append(float(loss.detach()).hex())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad = None
        if not step:
            first_bytes = memory.peak_bytes()
        if step + 1 == LEARNING_STEPS:
            before = found()
            memory.reset_peak()
    after = {name: n - before[name] for name, n in found().items()}
    return {"losses": seen, "first_bytes": first_bytes, "peak_bytes": memory.peak_bytes(), **after}


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    freeze_imports()
    heap().prepare()  # freed memory is kept for reuse, in the plain run too
    train(None if asked is None else "minimum", 16, 3, 8)
    torch._dynamo.reset()
    held = sum(memory.resident())
    memory.reset_peak()
    told = train(asked, WIDTH, LAYERS, LENGTH)
    peaks = {name: told[name] - held for name in ("first_bytes", "peak_bytes")}
    print(json.dumps(told | peaks | {"bytes_out": offcompile.counters()["bytes_out"]}))


if __name__ == "__main__":
    main()
