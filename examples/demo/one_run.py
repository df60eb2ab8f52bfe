"""A worker: measures the machine, or trains, as each line of JSON on standard input asks.

It tells how it goes on standard output, a line of JSON at a time.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offcompile
from offcompile.options import Options
from offcompile.runtime import memory
from offcompile.target import target_for

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


def train(task: dict[str, Any]) -> None:
    device = task["device"]
    if not task["quick"]:
        bring_in_the_compiler(task)
    peak = Peak(device)

    torch.manual_seed(SEED)
    model = GPT(task["layers"], task["width"], task["length"], task["checkpointed"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    forward = compiled(task, model, task["memory"])
    known = len(offcompile.reports())
    data = batches(task["batch"], task["length"], device)
    written = 0
    say(event="told", text="compiling")
    for step in range(task["steps"]):
        if step == 1:  # the first step compiled; from here on it is training
            peak.begin()
            written = offcompile.counters()["bytes_out"]
        text = next(data)
        began = time.perf_counter()
        loss = forward(text)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = float(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        say(event="step", seconds=time.perf_counter() - began, loss=value)
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    result: dict[str, Any] = {**peak.found(), "weight_bytes": weights}
    if task["memory"] is not None:
        (report,) = offcompile.reports()[known:]
        result["out_bytes"] = (offcompile.counters()["bytes_out"] - written) / (task["steps"] - 1)
        result["budget_bytes"] = report.budget_bytes
        result["text"] = report.to_text()
        report.save_html(Path(task["output"]) / "report.html")
        report.save_trace(Path(task["output"]) / "trace.json")
    say(event="done", **result)


if __name__ == "__main__":
    for line in sys.stdin:
        task = json.loads(line)
        if "calibrate" in task:
            calibrate(task["calibrate"])
        else:
            train(task)
            torch._dynamo.reset()
