"""Train a small GPT in about half the memory it takes, beside the plain run.

    python examples/train_gpt.py
    python examples/train_gpt.py --layers 12 --width 512 --memory 400MiB --lowering aot_eager

The model learns to continue Python source, byte by byte (that of the standard library, as it lies
on this machine). Each run is a process of its own, so that the operating system's account of its
peak memory is clean: what the process had before the model was built is taken off.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from offcompile.launch import environment

SEED = 0
MIB = 1 << 20


# --- the model and its data ------------------------------------------------------------------


def build(layers: int, width: int, length: int) -> Any:
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            heads = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, min(64, width)))
            q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            return x + self.down(F.gelu(self.up(self.norm2(x))))

    class GPT(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

        def forward(self, text: Any) -> Any:
            seen, wanted = text[:, :-1], text[:, 1:]
            x = self.token(seen) + self.place(torch.arange(seen.shape[1], device=text.device))
            logits = self.head(self.norm(self.blocks(x)))
            return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())

    torch.manual_seed(SEED)
    return GPT()


def batches(batch: int, length: int) -> Iterator[Any]:
    import torch

    folder = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))[: 4 * MIB]
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(data) - length - 1, (batch,), generator=random)
        yield torch.stack([data[int(s) : int(s) + length + 1] for s in starts]).long()


# --- one run, in a process of its own ---------------------------------------------------------


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def child(task: dict[str, Any]) -> None:
    """Train, and tell the parent line by line."""
    import torch

    import offcompile
    from offcompile.runtime import memory

    lowering = task["lowering"]
    options = {"memory": task["memory"], "lowering": lowering, "spill": task["spill"]}

    def compiled(model: Any, memory_bytes: Any) -> Any:
        if task["memory"] is None:
            return torch.compile(model, backend=lowering)
        return torch.compile(
            model, backend="offcompile", options={**options, "memory": memory_bytes}
        )

    # a tiny model brings in the compiler, whose own memory is not the model's
    compiled(build(1, 16, 16), "minimum")(torch.zeros(2, 17, dtype=torch.long)).backward()
    torch._dynamo.reset()
    gc.collect()
    before = sum(memory.resident())

    model = build(task["layers"], task["width"], task["length"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = compiled(model, task["memory"])
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    known = len(offcompile.reports())
    data = batches(task["batch"], task["length"])
    say(event="compiling")
    for step in range(task["steps"]):
        if step == 1:  # the first step compiled; from here on it is training
            gc.collect()
            memory.reset_peak()
            written = offcompile.counters()["bytes_out"]
        began = time.perf_counter()
        loss = forward(next(data))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(event="step", seconds=time.perf_counter() - began, loss=float(loss.detach()))
    report: dict[str, Any] = {"peak_bytes": memory.peak_bytes() - before, "weight_bytes": weights}
    if task["memory"] is not None:
        mine = offcompile.reports()[known:]
        moved = (offcompile.counters()["bytes_out"] - written) / (task["steps"] - 1)
        report["out_bytes"] = moved
        report["budget_bytes"] = max(r.budget_bytes for r in mine)
        report["text"] = "\n\n".join(r.to_text() for r in mine)
    say(event="done", **report)


# --- both runs, side by side -------------------------------------------------------------------


def run(console: Console, name: str, task: dict[str, Any]) -> dict[str, Any]:
    """Start a child, show what it does, and gather what it tells."""
    # both as `offcompile run` would start them
    process = subprocess.Popen(
        [sys.executable, __file__, "--child", json.dumps(task)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment(os.environ),
    )
    assert process.stdout is not None
    steps: list[dict[str, Any]] = []
    done: dict[str, Any] = {}
    began = time.perf_counter()
    with console.status(f"{name}: starting") as status:
        for line in process.stdout:
            told = json.loads(line)
            if told["event"] == "compiling":
                status.update(f"{name}: compiling")
            elif told["event"] == "step":
                if not steps:
                    spent = time.perf_counter() - began
                    console.print(f"{name}: started, compiled and ran once in {spent:.0f} s")
                steps.append(told)
                status.update(
                    f"{name}: step {len(steps)} of {task['steps']}, loss {told['loss']:.3f}"
                )
            else:
                done = told
    if process.wait() or not done:
        console.print(f"[red]{name}: stopped with exit code {process.returncode}")
        sys.exit(1)
    done["losses"] = [step["loss"] for step in steps]
    # the first step compiles, the second may still warm caches
    done["seconds"] = statistics.median(s["seconds"] for s in steps[2:])
    return done


def agreement(plain: list[float], ours: list[float]) -> str:
    far = max(abs(a - b) / abs(a) for a, b in zip(plain, ours, strict=True))
    if far == 0:
        return f"The losses of all {len(plain)} steps are equal to the last bit."
    verdict = "agree" if far < 1e-3 else "DO NOT AGREE"
    return f"The losses of all {len(plain)} steps {verdict}: within {far:.1e} of each other."


def show_bytes(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256, help="a multiple of 64, or below it")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="bytes of text in each sample")
    parser.add_argument("--steps", type=int, default=10, help="at least 3")
    parser.add_argument(
        "--memory",
        help="the budget: bytes, '300MiB' or 'minimum'; by default half of the plain run's peak "
        "after what the optimizer keeps, which no graph holds, is taken off",
    )
    parser.add_argument(
        "--lowering",
        choices=["aot_eager", "inductor"],
        default="aot_eager",
        help="aot_eager compiles in seconds and gives the same bits; inductor takes a minute",
    )
    parser.add_argument("--spill", help="directory on a disk (default: the temporary directory)")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        child(json.loads(asked.child))
        return
    if asked.steps < 3:
        parser.error("--steps: at least 3; the first compiles and the second warms up")
    console = Console()
    task = {k: v for k, v in vars(asked).items() if k not in ("child", "memory")}
    if task["lowering"] == "inductor" and not shutil.which("g++"):
        parser.error("--lowering: inductor needs g++, which is not there; use aot_eager")
    console.print(
        f"A GPT of {asked.layers} layers, width {asked.width}, on {asked.batch} × {asked.length} "
        f"bytes of Python source; AdamW, {asked.steps} steps, {task['lowering']}, on the CPU."
    )
    plain = run(console, "plain", {**task, "memory": None})
    states = 2 * plain["weight_bytes"]  # AdamW's two moments
    memory = asked.memory or (plain["peak_bytes"] // 2 - states)
    ours = run(console, "offcompile", {**task, "memory": memory})

    table = Table("", "peak memory", "step", "first loss", "last loss")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, found in (("plain", plain), ("offcompile", ours)):
        ratio = found["peak_bytes"] / plain["peak_bytes"]
        slower = found["seconds"] / plain["seconds"]
        beside = name != "plain"
        table.add_row(
            name,
            show_bytes(found["peak_bytes"]) + (f"  ({ratio:.0%})" if beside else ""),
            f"{found['seconds']:.2f} s" + (f"  ({slower:.2f} ×)" if beside else ""),
            f"{found['losses'][0]:.4f}",
            f"{found['losses'][-1]:.4f}",
        )
    console.print(table)
    console.print(agreement(plain["losses"], ours["losses"]))
    budget = show_bytes(ours["budget_bytes"])
    console.print(
        "Peak memory is what the operating system measured after the first step, less what the "
        f"process held before the model. The compiled step had a budget of {budget}; per step "
        f"{show_bytes(ours['out_bytes'])} left the device."
    )
    console.print(f"\nThe plan that ran:\n{ours['text']}", markup=False, highlight=False)


if __name__ == "__main__":
    main()
