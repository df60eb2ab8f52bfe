"""One of two ranks whose weights on the host are there once for both, beside the run in which each
rank has its own.

`python rank_shared_child.py RANK STORE ASKED` prints a line of JSON per case; ASKED is JSON, too:
the number of ranks, and names of cases.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from rank_cases import run_cases
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from offcompile import optim
from offcompile.ir import OffloadError
from offcompile.optim.ranks import common_weights
from offcompile.runtime.device.common import CommonSlot
from offcompile.runtime.moves.weights import device_of, is_on_host

WIDTH, DEPTH, STEPS = 128, 3, 4
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05, "memory": "minimum"}
Act = Callable[[nn.Module, int], None]


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = []
    for _ in range(DEPTH):
        layers += [nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH)]
    return nn.Sequential(*layers)


def batch(step: int) -> Tensor:
    mine = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(16, WIDTH, generator=mine)


def nothing(model: nn.Module, step: int) -> None:
    pass


class Run:
    """A model under DDP with its weights on the host. shared: once for all ranks, if possible."""

    def __init__(self, shared: bool, **how: Any) -> None:
        torch._dynamo.reset()
        self.model = build()
        inner: Any = torch.compile(self.model, backend="offcompile", options=OPTIONS)
        self.forward = DistributedDataParallel(inner, bucket_cap_mb=1)
        self.optimizer: Any
        if how.pop("torch", False):
            self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-2)
        else:
            self.optimizer = optim.AdamW(self.model.parameters(), 1e-2, sharded=True, **how)
        refused = patch.object(common_weights, "why_not", lambda: "the test wants it so")
        with nullcontext() if shared else refused:
            if not isinstance(self.optimizer, torch.optim.AdamW) or "_core" in vars(self.optimizer):
                sharding = self.optimizer._core.sharding
                sharding._common._refused = common_weights.why_not()
        self.seen: list[Tensor] = []

    def backward(self, step: int) -> None:
        loss = self.forward(batch(step)).pow(2).mean()
        self.seen.append(loss.detach().clone())
        loss.backward()

    def step(self, step: int, before: Act = nothing, between: Act = nothing) -> None:
        """before: what the program does before forward; between: after backward."""
        before(self.model, step)
        self.backward(step)
        between(self.model, step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seen += [p.detach().clone() for p in self.model.parameters()]

    def common(self) -> int:
        """How many weights lie in memory that ranks have in common."""
        slots = [(device_of(p), p) for p in self.model.parameters()]
        return sum(isinstance(d.slot_of(p), CommonSlot) for d, p in slots if d is not None)


def both(steps: int = STEPS, *, before: Act = nothing, between: Act = nothing, **how: Any) -> Any:
    """Train with memory in common and without: equal bits, weights in common after each step."""
    runs = Run(False, **how), Run(True, **how)
    counts = []
    for step in range(steps):
        for run in runs:
            run.step(step, before, between)
        counts.append(runs[1].common())
    apart, shared = runs
    return {
        "equal": len(apart.seen) == len(shared.seen)
        and all(map(torch.equal, apart.seen, shared.seen)),
        "common": counts,
        "apart": apart.common(),
    }


def plain() -> dict[str, Any]:
    return both()


def overlap() -> dict[str, Any]:
    return both(overlap=True)


def clipped() -> dict[str, Any]:
    return both(overlap=True, max_norm=0.05)


def by_torch() -> dict[str, Any]:
    """torch's optimizer updates on each rank: nothing is in common."""
    run = Run(True, torch=True)
    for step in range(2):
        run.step(step)
    return {"common": run.common(), "hosted": sum(map(is_on_host, run.model.parameters()))}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    case.__name__: case for case in (plain, overlap, clipped, by_torch)
}

if __name__ == "__main__":
    run_cases(CASES)
