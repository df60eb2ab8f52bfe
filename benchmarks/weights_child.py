"""The child process of `benchmarks.weights`: measures one schedule of one model."""

from __future__ import annotations

import atexit
import gc
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import offcompile
from benchmarks.activations_child import gpt
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.device.vector_math import settle_vector_math
from offcompile.runtime.memory.malloc.heap import heap


class Block(nn.Module):
    """A layer norm and an MLP four times as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(x), y)


@dataclass(frozen=True)
class Case:
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]


def mlp(width: int, layers: int, rows: int) -> Case:
    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        return (
            torch.randn(rows, width, generator=random),
            torch.randn(rows, width, generator=random),
        )

    return Case(
        f"MLP, width {width}, {layers} layers, batch {rows}", lambda: Tower(width, layers), draw
    )


def transformer(width: int, layers: int, batch: int, length: int) -> Case:
    found = gpt(width, layers, batch, length, 0.0)
    return Case(found.title, found.build, found.batch)


CASES = {
    # so few rows that loading a weight takes longer than using it
    "mlp-16": mlp(1536, 8, 16),
    "mlp-256": mlp(1536, 8, 256),
    "gpt": transformer(768, 8, 1, 512),
}
QUICK_CASES = {
    "mlp-16": mlp(256, 4, 16),
    "mlp-256": mlp(256, 4, 128),
    "gpt": transformer(128, 3, 2, 64),
}


def compiled(model: Any, task: dict[str, Any], memory_bytes: int | str | None) -> Any:
    if task["kind"] == "accelerate":
        return offloaded(model, task["spill"])
    if task["policy"] is None:
        return torch.compile(model, backend=task["lowering"])
    options = {
        "memory": memory_bytes,
        "lowering": task["lowering"],
        "spill": task["spill"],
        **({"gradient_reserve": task["reserve"]} if "reserve" in task else {}),
        **({"policy": task["policy"]} if "reserve" not in task else {}),
    }
    return torch.compile(model, backend="offcompile", options=options)


def offloaded(model: nn.Module, directory: str) -> nn.Module:
    """By accelerate: each weight is read from its file when its module is called."""
    from accelerate import disk_offload

    folder = tempfile.TemporaryDirectory(dir=directory)
    atexit.register(folder.cleanup)
    disk_offload(model, folder.name, execution_device=torch.device("cpu"))
    return model


def serve(task: dict[str, Any]) -> None:
    """Build and warm up, then answer each line from the parent with one line of JSON."""
    settle_vector_math()  # or one run in ten differs, plain or not
    heap().prepare()
    case = (QUICK_CASES if task["quick"] else CASES)[task["case"]]
    # brings in the compiler and the runtime, whose own memory is not the model's
    small = mlp(16, 1, 16)
    forward = compiled(small.build(), task | {"policy": task["policy"] and "joint"}, "minimum")
    forward(*small.batch(torch.Generator())).backward()
    del forward
    torch._dynamo.reset()
    gc.collect()
    before = memory.resident().anon_bytes

    torch.manual_seed(0)
    model = case.build()
    forward = compiled(model, task, task["memory"])
    weights = list(model.parameters())
    random = torch.Generator().manual_seed(0)

    def train() -> dict[str, Any]:
        inputs = case.batch(random)
        began = time.perf_counter()
        loss = forward(*inputs)
        loss.backward()
        seconds = time.perf_counter() - began
        with torch.no_grad():
            for weight in weights:
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=0.01)
                    weight.grad = None
        return {"seconds": seconds, "loss": float(loss.detach())}

    def infer() -> dict[str, Any]:
        inputs = case.batch(random)
        began = time.perf_counter()
        with torch.no_grad():
            loss = forward(*inputs)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "loss": float(loss)}

    step = infer if task.get("inference") else train

    def facts() -> dict[str, Any]:
        with Watch() as watch:
            step()
        found: dict[str, Any] = {"peak_bytes": watch.most_bytes - before}
        found["weight_bytes"] = sum(w.untyped_storage().nbytes() for w in weights)
        if task["policy"] is not None:
            report = offcompile.reports()[-1]
            found["budget_bytes"] = report.budget_bytes
            found["planned_us"] = report.planned_us
            found["planned_peak_bytes"] = report.planned_peak_bytes
            found["direct"] = len(report.plan.directs)
            rates = [la.bytes_per_us for la in report.machine.lanes if la.target == "device"]
            found["lane_gbps"] = max(rates) / 1000
            counters = offcompile.counters()
            keys = ("bytes_out", "bytes_in", "wait_us")
            found |= {key: counters[key] for key in keys}
        return found

    began = time.perf_counter()
    try:
        losses = [step()["loss"], step()["loss"]]
    except offcompile.OffloadError as error:
        print(f"  {error}", file=sys.stderr, flush=True)
        print(json.dumps({"refused": str(error)}), flush=True)
        return
    gc.collect()
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "step": step,
        "facts": facts,
        "warm": lambda: {
            "losses": losses,
            "seconds": time.perf_counter() - began,
            "weight_bytes": sum(w.untyped_storage().nbytes() for w in weights),
        },
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


class Watch:
    """Looks at this process's anonymous memory every few milliseconds."""

    def __enter__(self) -> Watch:
        self.most_bytes, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(0.003):
            self.most_bytes = max(self.most_bytes, memory.resident().anon_bytes)
