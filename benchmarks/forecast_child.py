"""The child processes of `benchmarks.forecast`: one plans before anything runs, others run steps.

Planning has a process of its own, so that it leaves nothing behind in those that are measured.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import offcompile
from benchmarks.activations_child import gpt, resnet
from benchmarks.weights_child import Tower
from offcompile.ir import HOST
from offcompile.report.report import PlanReport
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap

RATE, LOOK_S, WATCHED_STEPS = 0.01, 0.0003, 2


@dataclass(frozen=True)
class Case:
    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


def mlp(width: int, layers: int, rows: int) -> Case:
    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        x, y = (torch.randn(rows, width, generator=random) for _ in range(2))
        return x, y

    title = f"MLP, width {width}, {layers} layers, batch {rows}"
    return Case(title, lambda: Tower(width, layers), draw)


class Masked(nn.Module):
    """A Hugging Face model that fills in masked words, with its loss."""

    def __init__(self, width: int, layers: int, words: int, length: int) -> None:
        super().__init__()
        from transformers import BertConfig, BertForMaskedLM

        config = BertConfig(
            vocab_size=words,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
            max_position_embeddings=length,
        )
        self.inner = BertForMaskedLM(config)

    def forward(self, text: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.inner(input_ids=text, labels=labels).loss
        return loss


def bert(width: int, layers: int, batch: int, length: int) -> Case:
    words = 4000

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        text, labels = (torch.randint(words, (batch, length), generator=random) for _ in range(2))
        return text, labels

    title = f"BERT with dropout, width {width}, {layers} layers, batch {batch} × {length}"
    return Case(title, lambda: Masked(width, layers, words, length), draw)


def like(found: Any) -> Case:
    return Case(found.title, found.build, found.batch)


CASES = {
    "gpt": like(gpt(768, 8, 1, 512, 0.0)),
    "resnet": like(resnet([64, 64, 64, 128, 128, 128, 256, 256], 64, 8, 0.0)),
    "mlp": mlp(1536, 6, 64),
    "bert": bert(512, 6, 4, 256),
}
QUICK_CASES = {
    "gpt": like(gpt(256, 2, 2, 128, 0.0)),
    "resnet": like(resnet([16, 32], 32, 8, 0.0)),
    "mlp": mlp(384, 2, 64),
    "bert": bert(128, 2, 2, 64),
}


def case_of(task: dict[str, Any]) -> Case:
    return (QUICK_CASES if task["quick"] else CASES)[task["case"]]


def options_of(task: dict[str, Any], memory_asked: int | str | None) -> dict[str, Any]:
    return {"memory": memory_asked, "lowering": task["lowering"], "spill": task["spill"]}


# --- before anything runs --------------------------------------------------------------------


def foresee(task: dict[str, Any]) -> None:
    """One line of JSON: the plan of each budget, as shares of what the plain step holds."""
    case = case_of(task)
    with torch.device("meta"):
        model = case.build()
    inputs = case.batch(torch.Generator())
    began, found = time.perf_counter(), []
    plain_bytes = 0
    for share in task["shares"]:
        budget = share if share in (None, "minimum") else int(share * plain_bytes)
        options = {k: v for k, v in options_of(task, budget).items() if k != "memory"}
        report = offcompile.plan(model, *inputs, memory=budget, measure=True, options=options)
        plain_bytes = plain_bytes or report.planned_peak_bytes
        found.append({"memory": budget, **said(report)})
    seconds = time.perf_counter() - began
    print(json.dumps({"rows": found, "seconds": seconds}), flush=True)


def said(report: PlanReport) -> dict[str, Any]:
    return {
        "peak_bytes": report.planned_peak_bytes,
        "needed_bytes": report.needed_peak_bytes,
        "holes_bytes": report.memory.holes_bytes,
        "foreseen_us": report.foreseen_us,
        "touched_bytes": 0 if report.returns is None else report.returns.touched_bytes,
        "fits": report.fits,
    }


# --- steps -----------------------------------------------------------------------------------


def serve(task: dict[str, Any]) -> None:
    """Build and warm up, then answer each line from the parent with one line of JSON."""
    lean = task["memory"] is None  # no budget: malloc does as it does without offcompile
    if not lean:
        heap().prepare()
    small = mlp(16, 1, 16)
    options = options_of(task, None if lean else "minimum")
    # brings in the compiler and the runtime, whose own memory is not the model's
    torch.compile(small.build(), backend="offcompile", options=options)(
        *small.batch(torch.Generator())
    ).backward()
    torch._dynamo.reset()
    gc.collect()
    heap().trim()
    before = heap().resident_bytes()
    known = len(offcompile.reports())

    case = case_of(task)
    torch.manual_seed(0)
    model = case.build()
    weights = list(model.parameters())
    forward = torch.compile(model, backend="offcompile", options=options_of(task, task["memory"]))
    random = torch.Generator().manual_seed(0)

    def step() -> dict[str, Any]:
        inputs = case.batch(random)
        began = time.perf_counter()
        loss = forward(*inputs)
        loss.backward()
        seconds = time.perf_counter() - began
        with torch.no_grad():
            for weight in weights:
                if weight.grad is not None:
                    weight.sub_(weight.grad, alpha=RATE)
                    weight.grad = None
        return {"seconds": seconds}

    def stand() -> tuple[int, int]:
        """Bytes in malloc's blocks, and bytes that the process holds, without the model's own."""
        gc.collect()
        heap().trim()
        on_host = sum(t.nbytes for t in offcompile.reports()[-1].problem.tensors if t.home == HOST)
        own = own_bytes(model) - on_host
        return heap().live_bytes() - own, heap().resident_bytes() - own

    def facts() -> dict[str, Any]:
        report = offcompile.reports()[-1]
        arena_bytes = offcompile.counters().get("arena_bytes", 0)
        if lean:  # what malloc would keep for use again is no tensor's
            return_freed_memory()
        live, resident = stand()
        with Watch() as watch:
            for _ in range(WATCHED_STEPS):
                step()
        return {
            "plans": len(offcompile.reports()) - known,
            "planned": said(report),
            "predicted_us": report.predicted_us,
            "tensor_bytes": watch.live_bytes - live + arena_bytes,
            "held_bytes": watch.resident_bytes - resident + arena_bytes,
            # bytes that the process gained beside weights and buffers: most of it compiled code
            "left_bytes": resident - arena_bytes - before,
        }

    began = time.perf_counter()
    step()
    gc.collect()
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "step": step,
        "facts": facts,
        "warm": lambda: {"losses": [], "seconds": time.perf_counter() - began},
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)


def own_bytes(model: nn.Module) -> int:
    """Bytes of its parameters and buffers; each storage counts once."""
    return sum({s._cdata: s.nbytes() for s in _storages(model)}.values())


def _storages(model: nn.Module) -> Iterator[torch.UntypedStorage]:
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor.untyped_storage()


class Watch:
    """Looks at malloc's blocks and at this process's anonymous memory, as often as it can."""

    def __enter__(self) -> Watch:
        self.live_bytes = self.resident_bytes = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.live_bytes = max(self.live_bytes, heap().live_bytes())
            self.resident_bytes = max(self.resident_bytes, heap().resident_bytes())
