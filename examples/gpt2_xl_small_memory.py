"""GPT-2 XL (1.5 billion parameters, fp32, AdamW) trains in 7 GiB of memory, without a GPU.

    python examples/gpt2_xl_small_memory.py
    python examples/gpt2_xl_small_memory.py --layers 12 --width 768 --memory 2.5

Weights, gradients and the optimizer's two moments are 25 GB together. Weights live in a mapped file
(page cache, which the system may take back), moments in another that is read and written past the
page cache; each gradient is applied as soon as it is made, so that they never stand together. The
system enforces the limit (RLIMIT_DATA): a program that held more would be refused memory.

First a model of two layers is trained both ways, by plain torch and like this: losses are equal to
the last bit.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import offcompile
from offcompile.machine.this_machine import this_machine

GIB = 1 << 30
VOCABULARY = 50257


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind()
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int, told: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.01)
        self.blocks = nn.ModuleList()
        for i in range(layers):
            self.blocks.append(Block(width, heads))
            if told:
                tell(f"  layer {i + 1} of {layers}", again=True)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each token from those before it."""
        seen, wanted = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(seen) + self.places.weight[: seen.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def tell(text: str, again: bool = False) -> None:
    """A line of progress; `again`: over the last one, where that can be done."""
    over = again and sys.stderr.isatty()
    if over or not again:
        print(f"\r\033[K{text}" if over else text, end="" if over else "\n", file=sys.stderr)
        sys.stderr.flush()


def batch(asked: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = (asked.batch, asked.tokens + 1)
    return torch.randint(0, VOCABULARY, shape, generator=generator)


def anonymous_bytes() -> int:
    with open("/proc/self/status") as status:
        found = dict(line.split(":", 1) for line in status)
    return int(found["RssAnon"].split()[0]) << 10


def disk_bytes() -> tuple[int, int]:
    """Bytes that the disk has read and written for this process so far."""
    with open("/proc/self/io") as io:
        found = dict(line.split(":") for line in io)
    return int(found["read_bytes"]), int(found["write_bytes"])


def train(asked: argparse.Namespace) -> None:
    """One run, in a process of its own; its losses go to standard output."""
    torch.manual_seed(0)
    ours = asked.run == "ours"
    if ours and asked.memory:
        limit = int(asked.memory * GIB)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    size = (asked.layers, asked.width, asked.heads, asked.tokens)
    began = time.perf_counter()
    if ours:
        with offcompile.host_init("cpu", spill=asked.spill):
            model = GPT2(*size, told=True)
        step_of = torch.compile(
            model,
            backend="offcompile",
            options={
                # the rest is for Python, torch, and the optimizer's buffers
                "memory": asked.budget or f"{max(asked.memory - 1.5, asked.memory / 2)}GiB",
                "lowering": asked.lowering,
                "spill": asked.spill,
            },
        )
        optimizer: torch.optim.Optimizer = offcompile.optim.AdamW(
            model.parameters(), lr=3e-4, overlap=True, states="disk", directory=asked.spill
        )
    else:
        model = GPT2(*size, told=False)
        step_of = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    count = sum(p.numel() for p in model.parameters())
    if asked.told:
        tell(f"{count / 1e6:,.0f} M parameters made in {time.perf_counter() - began:.0f} s;")
        tell(f"weights, gradients and moments: {16 * count / 1e9:.1f} GB")
        tell("the first step traces, measures and plans, which takes minutes for 48 layers")
    tokens, losses, most = batch(asked), [], 0
    for i in range(asked.steps):
        began, before = time.perf_counter(), disk_bytes()
        loss = step_of(tokens)
        most = max(most, anonymous_bytes())
        forward = time.perf_counter() - began
        if asked.told:
            tell(f"  step {i + 1}: forward {forward:.1f} s, loss {loss.item():.4f}", again=True)
        loss.backward()
        most = max(most, anonymous_bytes())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        read, written = (b - a for a, b in zip(before, disk_bytes(), strict=True))
        if asked.told:
            tell(
                f"step {i + 1} of {asked.steps}: loss {losses[-1]:.4f},"
                f" {time.perf_counter() - began:.1f} s (forward {forward:.1f}),"
                f" disk: {read / 1e9:.1f} GB read, {written / 1e9:.1f} GB written;"
                f" held by the process: {most / GIB:.2f} GiB"
            )
    if asked.told and ours:
        limits(asked, read, written)
    print(json.dumps(losses))


def limits(asked: argparse.Namespace, read_bytes: int, written_bytes: int) -> None:
    """Tell the least time of a step: its compute, and its bytes at the disk's own rates."""
    report = offcompile.reports()[-1]
    disk = this_machine((Path(asked.spill),))
    read, write = disk.h2d_gbps, disk.d2h_gbps
    reading, writing = read_bytes / read / 1e9, written_bytes / write / 1e9
    tell(f"compute, as planned: {report.planned_us / 1e6:.1f} s a step")
    tell(
        f"the disk reads {read:.1f} GB/s and writes {write:.1f} GB/s, by turns:"
        f" {reading:.1f} s and {writing:.1f} s a step at best"
    )


def run(asked: argparse.Namespace, **changed: object) -> list[float]:
    """`train` with some settings changed, in a process of its own."""
    settings = {**vars(asked), **changed}
    command = [sys.executable, os.path.abspath(__file__)]
    for name, value in settings.items():
        if value is True:
            command.append(f"--{name}")
        elif value not in (None, False):
            command += [f"--{name}", str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"the run stopped with status {done.returncode}")
    found: list[float] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1600)
    parser.add_argument("--heads", type=int, default=25)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--memory", type=float, default=7.0, help="RLIMIT_DATA in GiB")
    parser.add_argument("--budget", help="of the compiled step; as the option 'memory'")
    parser.add_argument("--spill", default="/var/tmp", help="directory on a disk")
    parser.add_argument("--lowering", default="aot_eager", choices=["aot_eager", "inductor"])
    parser.add_argument("--quick", action="store_true", help="a tiny model alone, two steps")
    parser.add_argument("--run", choices=["ours", "plain"], help=argparse.SUPPRESS)
    parser.add_argument("--told", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        train(asked)
        return
    if asked.quick:
        small = {"layers": 1, "width": 32, "heads": 2, "tokens": 32, "steps": 2, "memory": 3.0}
        run(asked, **small, run="ours", budget="minimum", told=True)
        return
    tell("two layers, by plain torch and by offcompile:")
    plain = run(asked, layers=2, run="plain", memory=0.0)
    ours = run(asked, layers=2, run="ours", memory=max(3.0, asked.memory / 2), budget="1.25GiB")
    for a, b in zip(plain, ours, strict=True):
        tell(f"  loss {a!r} and {b!r}{'' if a == b else ' DIFFER'}")
    if asked.lowering == "aot_eager" and plain != ours:
        sys.exit("the losses differ")
    tell(f"{asked.layers} layers in {asked.memory} GiB:")
    run(asked, run="ours", told=True)


if __name__ == "__main__":
    main()
