"""A worker: measures the machine, or trains, as each line of JSON on standard input asks.

`python -m demo.one_run RANK RANKS STORE`: with several RANKS, it trains with the others, which have
the same file STORE.

Lines are `{"calibrate": directory}`, `{"start": task}`, `{"step": name}`, `{"finish": name}`. It
tells how it goes on standard output, a line of JSON at a time; the last one for each has the event
"done".
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import offcompile
from offcompile.machine.options import Options
from offcompile.machine.target import target_for
from offcompile.runtime.base import process_memory as memory

from .gpt import GPT, SEED, batches


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Peak:
    """The most memory held since `begin`, less what was there before the model."""

    def __init__(self, device: str) -> None:
        self.on_card = device == "cuda"
        self.before = torch.cuda.memory_allocated() if self.on_card else sum(memory.resident())

    def begin(self) -> None:
        gc.collect()
        if self.on_card:
            torch.cuda.reset_peak_memory_stats()
        else:
            memory.reset_peak()

    def found(self) -> dict[str, int]:
        if self.on_card:
            return {
                "peak_bytes": torch.cuda.max_memory_allocated() - self.before,
                "reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        return {"peak_bytes": memory.peak_bytes() - self.before}


def compiled(task: dict[str, Any], model: nn.Module, budget: int | str | None) -> Any:
    if budget is None:
        return torch.compile(model, backend=task["lowering"])
    options = {"memory": budget, "lowering": task["lowering"]}
    if task["spill"]:
        options["spill"] = task["spill"]
    if task["quick"]:  # a shipped profile: no op is measured
        options["hardware"] = "cpu"
    return torch.compile(model, backend="offcompile", options=options)


def calibrate(spill: str | None) -> None:
    """Measure this machine if that was not done before."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = Options.read({"spill": spill} if spill else {})
    target = target_for(options, torch.device(device), lambda text: say(event="told", text=text))
    profile = target.profile
    say(event="done", device=device, out_gbps=profile.d2h_gbps, back_gbps=profile.h2d_gbps)


def bring_in_the_compiler(task: dict[str, Any]) -> None:
    """By a tiny model, since the memory of the compiler is not that of the model."""
    torch.manual_seed(SEED)
    tiny = GPT(1, 16, 16, task["checkpointed"]).to(task["device"])
    step = compiled(task, tiny, None if task["memory"] is None else "minimum")
    step(torch.zeros(2, 17, dtype=torch.long, device=task["device"])).backward()
    del tiny, step
    torch._dynamo.reset()
    gc.collect()


class Run:
    """A model in training: two steps when it is made, and one for each `step`."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.task, self.device = task, task["device"]
        if not task["quick"]:
            bring_in_the_compiler(task)
        self.peak = Peak(self.device)
        torch.manual_seed(SEED)
        size = (task["layers"], task["width"], task["length"], task["checkpointed"])
        self.model = GPT(*size).to(self.device)
        self.forward = compiled(task, self.model, task["memory"])
        if dist.is_initialized():
            self.forward = DistributedDataParallel(self.forward)
        self.optimizer = self.make_optimizer()
        self.data = batches(task["batch"], task["length"], self.device, rank())
        self.known = len(offcompile.reports())
        say(event="told", text="compiling")
        losses = [self.step()[1]]
        self.peak.begin()  # the first step compiled; from here on it is training
        self.written = offcompile.counters()["bytes_out"]
        losses.append(self.step()[1])
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        say(event="done", losses=losses, weight_bytes=weights, **self.peak.found())

    def make_optimizer(self) -> torch.optim.Optimizer:
        if self.task["memory"] is None or not dist.is_initialized():
            return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        # the same bits: each rank keeps a share of the states, in a mapped file
        return offcompile.optim.AdamW(
            self.model.parameters(), lr=1e-3, states="host", overlap=True, sharded=True
        )

    def step(self) -> tuple[float, float]:
        """Seconds, and the loss."""
        text = next(self.data)
        began = time.perf_counter()
        loss = self.forward(text)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        value = float(loss.detach())
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, value

    def finish(self) -> None:
        """Tell what it took; of offcompile's run, write what there is to see."""
        result: dict[str, Any] = self.peak.found()
        if self.task["memory"] is not None:
            # DDP may cut the model into several graphs: show the one that computes most
            reports = offcompile.reports()[self.known :]
            report = max(reports, key=lambda one: len(one.problem.ops))
            moved = offcompile.counters()["bytes_out"] - self.written
            result["out_bytes"] = moved / (self.task["steps"] - 1)
            result["budget_bytes"] = report.budget_bytes
            result["text"] = report.to_text()
            if rank() == 0:
                report.save_html(Path(self.task["output"]) / "report.html")
                report.save_trace(Path(self.task["output"]) / "trace.json")
        say(event="done", **result)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def join(rank: int, ranks: int, store: str) -> None:
    """Meet the other ranks, if there are any."""
    if ranks > 1:
        file = dist.FileStore(store, ranks)
        dist.init_process_group("gloo", store=file, rank=rank, world_size=ranks)


def serve() -> None:
    runs: dict[str, Run] = {}
    for line in sys.stdin:
        (what, about), *_ = json.loads(line).items()
        if what == "calibrate":
            calibrate(about)
        elif what == "start":
            runs[about["name"]] = Run(about)
        elif what == "step":
            seconds, loss = runs[about].step()
            say(event="done", seconds=seconds, loss=loss)
        else:
            runs[about].finish()


if __name__ == "__main__":
    join(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    serve()
    if dist.is_initialized():
        dist.destroy_process_group()
