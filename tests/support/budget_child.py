"""One training run in a process of its own, whose memory the kernel measures and may limit.

`python budget_child.py '{"model": …, "memory": …, "limit": …}'` prints one JSON object. `memory`
is the budget of offcompile in bytes, or "plain" for the plain backend. `limit` allows that many
bytes of private memory beyond what the process has before the model is built; null: no limit.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

import torch
from freeze_imports import freeze_imports
from zoo import GPT, MLP, Specimen

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap

STEPS = 3


def _numbers(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def _tokens(seed: int, *size: int) -> torch.Tensor:
    return torch.randint(0, 96, size, generator=torch.Generator().manual_seed(seed))


class Loss(MLP):
    """With its loss inside: what autograd keeps of one outside no plan can know of, and here it
    would be several activations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def deep_mlp(rows: int, width: int, depth: int) -> Specimen:
    return Specimen(
        "mlp",
        lambda: Loss(width, depth),
        lambda seed: (_numbers(seed, rows, width),),
        lambda loss: loss,
    )


def gpt(batch: int, width: int, depth: int) -> Specimen:
    return Specimen(
        "gpt",
        lambda: GPT(96, width, depth, 4, 256),
        lambda seed: (_tokens(seed, batch, 257),),
        lambda loss: loss,
    )


# name → the model, and a tiny one of its kind that brings in code, threads and caches beforehand
MODELS = {
    "mlp": (deep_mlp(8192, 256, 16), deep_mlp(64, 32, 2)),
    "gpt": (gpt(12, 192, 3), gpt(1, 16, 1)),
}


def train(specimen: Specimen, asked: int | str, steps: int) -> list[str]:
    """Losses as exact text; plain SGD, so that the step holds nothing beside weights and grads."""
    model = specimen.fresh()
    if asked == "plain":
        forward: Any = torch.compile(model, backend="aot_eager")
    else:
        options = {"memory": asked, "lowering": "aot_eager", "seconds": 0.3}
        forward = torch.compile(model, backend="offcompile", options=options)
    losses = []
    for step in range(steps):
        loss = specimen.loss(forward(*specimen.inputs(step)))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.05)
                parameter.grad = None
        losses.append(float(loss.detach()).hex())
    return losses


def main() -> None:
    task = json.loads(sys.argv[1])
    # one where tests share the cores (conftest.py): two would wait for each other
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    freeze_imports()
    # the same allocator for both: freed tensors go back to the system, so that what is measured
    # and limited is what is held
    return_freed_memory()
    specimen, small = MODELS[task["model"]]
    train(small, task["memory"] if task["memory"] == "plain" else "minimum", STEPS)
    torch._dynamo.reset()
    known = len(offcompile.reports())
    if task["limit"] is not None:
        heap().trim()  # no slack from before
        allowed = memory.data_bytes() + task["limit"]
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    before = sum(memory.resident())
    memory.reset_peak()
    found: dict[str, Any] = {"losses": [], "error": None}
    try:
        found["losses"] = train(specimen, task["memory"], STEPS)
    except (RuntimeError, MemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    found["peak_bytes"] = memory.peak_bytes() - before
    reports = offcompile.reports()[known:]
    found["planned_peak_bytes"] = max((r.planned_peak_bytes for r in reports), default=None)
    found["counters"] = offcompile.counters()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
