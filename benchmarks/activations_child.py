"""The child process of `benchmarks.activations`: models, and one variant of training one of them.

Each variant has a process of its own, which waits, runs a step when the parent asks for one, and
tells how long it took and the most that it held.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.device.vector_math import settle_vector_math
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.registry import runtimes


class Attention(nn.Module):
    """A GPT block: causal attention and an MLP, each behind its norm."""

    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head = min(head, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.head))
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Residual(nn.Module):
    """A ResNet block; with more channels than it gets, it also halves the image."""

    def __init__(self, before: int, channels: int) -> None:
        super().__init__()
        stride = 1 if before == channels else 2
        self.conv1 = nn.Conv2d(before, channels, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.short = nn.Identity() if stride == 1 else nn.Conv2d(before, channels, 1, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Stack(nn.Module):
    """Stem, blocks, head; `again` runs each block again in backward, as checkpointing does.

    The graph breaks before the blocks in `breaks`. `routed`: the data choose which block is next.
    """

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.again = self.routed = False
        self.breaks: tuple[int, ...] = ()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.stem(inputs)
        for i, block in enumerate(self.blocks):
            if i in self.breaks:
                torch._dynamo.graph_break()
            if self.routed:
                choice = int(x.detach().double().sum().abs().mul(1e3)) + i
                block = self.blocks[choice % len(self.blocks)]
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return F.cross_entropy(self.head(x).flatten(0, -2), targets.flatten())


class Embed(nn.Module):
    def __init__(self, vocabulary: int, width: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.place(torch.arange(tokens.shape[1]))


@dataclass(frozen=True)
class Case:
    """A model with its batch.

    `torch_budget` is the `activation_memory_budget` that comes nearest to checkpointing's memory
    (a smaller one takes more on the ResNet: what is computed again stands all at once).
    """

    title: str
    build: Callable[[], Stack]
    batch: Callable[[torch.Generator], tuple[Tensor, ...]]
    torch_budget: float


def gpt(width: int, layers: int, batch: int, length: int, torch_budget: float) -> Case:
    vocabulary = 1000

    def build() -> Stack:
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False))
        blocks: list[nn.Module] = [Attention(width) for _ in range(layers)]
        return Stack(Embed(vocabulary, width, length), blocks, head)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = torch.randint(vocabulary, (batch, length + 1), generator=random)
        return tokens[:, :-1], tokens[:, 1:]

    title = f"GPT, width {width}, {layers} layers, batch {batch} × {length}"
    return Case(title, build, draw, torch_budget)


def resnet(channels: list[int], side: int, batch: int, torch_budget: float) -> Case:
    def build() -> Stack:
        stem = nn.Conv2d(3, channels[0], 3, 1, 1)
        pairs = zip([channels[0], *channels], channels, strict=False)
        blocks: list[nn.Module] = [Residual(a, b) for a, b in pairs]
        head = nn.Sequential(
            nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(16 * channels[-1], 100)
        )
        return Stack(stem, blocks, head)

    def draw(random: torch.Generator) -> tuple[Tensor, Tensor]:
        images = torch.randn(batch, 3, side, side, generator=random)
        return images, torch.randint(100, (batch,), generator=random)

    title = f"ResNet, {len(channels)} blocks, batch {batch} × {side} × {side}"
    return Case(title, build, draw, torch_budget)


CASES = {
    "gpt": gpt(768, 8, 4, 512, 0.1),
    "resnet": resnet([64, 64, 64, 128, 128, 128, 256, 256], 64, 24, 0.5),
}
QUICK_CASES = {
    "gpt": gpt(128, 3, 4, 128, 0.1),
    "resnet": resnet([16, 16, 32, 32], 32, 16, 0.5),
}


#: shares of the whole length, step by step, where lengths change
CUTS = (1, 0.75, 0.5)
#: variants of ours: one graph, one compiled block for all, three graphs
OURS = ("ours", "blocks", "breaks")


def compiled(model: Any, task: dict[str, Any], memory_bytes: int | str | None) -> Any:
    if task.get("each") and task["kind"] not in OURS:
        for block in model.blocks:
            block.compile(backend=task["lowering"])
        return model
    if task["kind"] in OURS:
        options = {"memory": memory_bytes, "lowering": task["lowering"], "spill": task["spill"]}
        if task["kind"] == "blocks":
            for block in model.blocks:
                block.compile(backend="offcompile", options=options)
            return model
        if task["kind"] == "breaks":
            third = len(model.blocks) // 3
            model.breaks = (third, 2 * third)
        return torch.compile(model, backend="offcompile", options=options)
    return torch.compile(model, backend=task["lowering"])


def looked_ahead() -> dict[str, int]:
    """How what was wanted was found, where graphs share a budget."""
    for runtime in runtimes():
        if runtime.mover.keeper is not None:
            seen = runtime.mover.keeper.foresight.counters
            return {"hits": seen.hits, "late": seen.late, "misses": seen.misses}
    return {}


def planned_step() -> dict[str, int]:
    """Give the bytes that the newest plan of a whole step evicts, and all that graphs save."""
    for runtime in runtimes():
        keeper = runtime.mover.keeper
        if keeper is not None and keeper.steps.newest is not None:
            table = keeper.steps.newest
            saved_bytes = sum(map(table.step.nbytes, table.step.wanted))
            return {"planned_out_bytes": table.moved_bytes, "saved_bytes": saved_bytes}
    return {}


def serve(task: dict[str, Any], case: Case | None = None) -> None:
    """Build and warm up, then answer each line from the parent with one line of JSON."""
    settle_vector_math()  # or one run in ten differs, plain or not
    if task["returns_freed"]:
        return_freed_memory()
    else:
        heap().prepare()  # freed memory is kept for reuse, for the peers as for ours
    case = case or (QUICK_CASES if task["quick"] else CASES)[task["case"]]
    if task["kind"] == "torch budget":
        import torch._functorch.config as functorch

        functorch.activation_memory_budget = case.torch_budget
    # brings in the compiler and the runtime, whose own memory is not the model's
    small = gpt(16, 1, 2, 16, 0.0)
    compiled(small.build(), task, "minimum")(*small.batch(torch.Generator())).backward()
    torch._dynamo.reset()
    gc.collect()
    before = sum(memory.resident())

    torch.manual_seed(0)
    model = case.build()
    model.again = task["kind"] == "checkpoint"
    model.routed = bool(task.get("routed"))
    weights = [p for p in model.parameters() if p.requires_grad]
    forward, at_floor = compiled(model, task, task["memory"]), False
    random, steps = torch.Generator().manual_seed(0), 0

    def step() -> dict[str, Any]:
        nonlocal steps
        inputs = case.batch(random)
        if task.get("lengths"):
            cut = CUTS[steps % len(CUTS)]
            inputs = tuple(x[:, : int(x.shape[1] * cut)] for x in inputs)
        steps += 1
        if task.get("eval_every") and steps % task["eval_every"] == 0:
            model.eval()
            with torch.no_grad():
                forward(*inputs)
            model.train()
        began = time.perf_counter()
        loss = forward(*inputs)
        loss.backward()
        with torch.no_grad():
            for weight in weights:
                if weight.grad is not None:  # an expert that nobody chose has none
                    weight.sub_(weight.grad, alpha=0.01)
                    weight.grad = None
        done = {"seconds": time.perf_counter() - began, "loss": float(loss.detach())}
        return done | ({"ahead": looked_ahead()} if task["kind"] in OURS else {})

    def facts() -> dict[str, Any]:
        found: dict[str, Any] = {"peak_bytes": memory.peak_bytes() - before}
        found["at_floor"] = at_floor
        found["weight_bytes"] = sum(w.untyped_storage().nbytes() for w in weights)
        if task["kind"] in OURS:
            report = offcompile.reports()[-1]
            found["budget_bytes"] = report.budget_bytes
            found["planned_us"] = report.planned_us
            found["planned_peak_bytes"] = report.planned_peak_bytes
            found["ops_again"] = len(report.plan.recomputes)
            counters = offcompile.counters()
            told = ("bytes_out", "raw_bytes_out", "bytes_in", "wait_us", "heap_trims")
            found |= {name: counters[name] for name in told}
            found["ahead"] = looked_ahead()
            found |= planned_step()
        return found

    began = time.perf_counter()
    try:
        first_steps = [step()]
        first_peak_bytes = memory.peak_bytes() - before
        first_steps.append(step())
    except offcompile.Infeasible as error:
        print(f"  {error}", file=sys.stderr, flush=True)
        at_floor = True
        torch._dynamo.reset()
        forward, random = compiled(model, task, "minimum"), torch.Generator().manual_seed(0)
        first_steps = [step(), step()]
        first_peak_bytes = memory.peak_bytes() - before
    losses = [done["loss"] for done in first_steps]
    for _ in range(task.get("settling", 0)):
        losses.append(step()["loss"])
    gc.collect()
    memory.reset_peak()
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "step": step,
        "facts": facts,
        "warm": lambda: {
            "losses": losses,
            "seconds": time.perf_counter() - began,
            "peak_bytes": first_peak_bytes,
            "each_seconds": [done["seconds"] for done in first_steps],
        },
    }
    for line in sys.stdin:
        print(json.dumps(answers[line.strip()]()), flush=True)
