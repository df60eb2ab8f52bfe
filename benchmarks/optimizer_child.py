"""The child process of `benchmarks.optimizer`: measures whole steps with one optimizer."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import offcompile
from benchmarks.weights_child import CASES, QUICK_CASES, Watch
from offcompile import optim
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.device.vector_math import settle_vector_math
from offcompile.runtime.memory.malloc.heap import heap

#: the second step is the first one with overlap, and the eighth may bring another plan
WARM_STEPS = 10


def optimizer_of(model: nn.Module, task: dict[str, Any]) -> torch.optim.Optimizer:
    how = dict(task["optimizer"])
    if how.pop("torch", False):
        return torch.optim.AdamW(model.parameters(), lr=1e-4, **how)
    return optim.AdamW(model.parameters(), lr=1e-4, directory=task["spill"], **how)


def serve(task: dict[str, Any]) -> None:
    """Build and warm up, then answer each line from the parent with one line of JSON."""
    settle_vector_math()  # or one run in ten differs, plain or not
    heap().prepare()
    before = memory.resident().anon_bytes
    case = (QUICK_CASES if task["quick"] else CASES)[task["case"]]
    torch.manual_seed(0)
    model = case.build()
    weight_bytes = sum(w.untyped_storage().nbytes() for w in model.parameters())
    options: dict[str, Any] = {"backend": task["lowering"]}
    if task["share"] is not None:
        options = {
            "backend": "offcompile",
            "options": {
                "memory": int(task["share"] * weight_bytes),
                "lowering": task["lowering"],
                "spill": task["spill"],
            },
        }
    forward: Any = torch.compile(model, **options)
    optimizer = optimizer_of(model, task)
    random = torch.Generator().manual_seed(0)
    max_norm = task.get("clip")

    def step() -> dict[str, Any]:
        inputs = case.batch(random)
        began = time.perf_counter()
        loss = forward(*inputs)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        return {"seconds": time.perf_counter() - began, "loss": float(loss.detach())}

    def facts() -> dict[str, Any]:
        with Watch() as watch:
            step()
        return {"peak_bytes": watch.most_bytes - before, "weight_bytes": weight_bytes}

    began = time.perf_counter()
    try:
        losses = [step()["loss"] for _ in range(WARM_STEPS)]
    except offcompile.OffloadError as error:
        print(f"  {error}", file=sys.stderr, flush=True)
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    gc.collect()
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "step": step,
        "facts": facts,
        "warm": lambda: {"losses": losses, "seconds": time.perf_counter() - began},
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)
