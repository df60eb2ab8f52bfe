"""One training run of a model that is mostly weights, in a process that the kernel may limit.

`python weights_child.py '{"memory": …, "limit": …, "born": …, "spill": …}'` prints one JSON object.
`memory` is the budget of offcompile in bytes, or "plain" for the plain backend. `limit` allows that
many bytes of private memory beyond what the process has before the model is built; null: no limit.
`born`: whether the model is built on the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import Any
from zlib import crc32

import torch
from freeze_imports import freeze_imports
from torch import Tensor, nn

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.weights import is_on_host

STEPS, ROWS = 3, 64
DROP_PAGES = 4  # MADV_DONTNEED of Linux: on a shared mapping of a file it loses nothing


class Anonymous:
    """Watches how much private memory the process holds, every other millisecond."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self.done = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        while not self.done.wait(0.002):
            self.look()

    def look(self) -> None:
        self.peak_bytes = max(self.peak_bytes, memory.resident().anon_bytes)

    def __enter__(self) -> Anonymous:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


def build(width: int, depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers = ((nn.Linear(width, width, bias=False), nn.ReLU()) for _ in range(depth))
    model = nn.Sequential(*(part for pair in layers for part in pair))
    for parameter in model.parameters():
        nn.init.kaiming_normal_(parameter)
    return model


def compiled(model: nn.Module, task: dict[str, Any], asked: int | str) -> Any:
    if task["memory"] == "plain":
        return torch.compile(model, backend="aot_eager")
    # costs from a profile: the plan is the same on a busy machine
    options = {
        "memory": asked,
        "lowering": "aot_eager",
        "spill": task["spill"],
        "hardware": "cpu",
    }
    return torch.compile(model, backend="offcompile", options=options)


def step(forward: Any, model: nn.Module, seed: int) -> Tensor:
    x = torch.randn(ROWS, model[0].in_features, generator=torch.Generator().manual_seed(seed))
    loss = forward(x).square().mean()
    loss.backward()
    return loss.detach()


def update(model: nn.Module) -> None:
    """SGD without momentum: nothing beside weights and gradients."""
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=0.05)  # type: ignore[arg-type]
            p.grad = None


def mappings(tensors: Iterable[Tensor]) -> Iterator[tuple[int, int, dict[str, int]]]:
    """Each mapping of the process that some tensor lies on: start, end, bytes by kind."""
    wanted = sorted(t.data_ptr() for t in tensors)
    found: list[tuple[int, int, dict[str, int]]] = []
    with open("/proc/self/smaps") as lines:
        for line in lines:
            head, *rest = line.split()
            if not head.endswith(":"):
                start, end = (int(n, 16) for n in head.split("-"))
                found.append((start, end, {}))
            elif rest[-1] == "kB":
                found[-1][2][head[:-1]] = int(rest[0]) * 1024
    return (m for m in found if any(m[0] <= at < m[1] for at in wanted))


def held(model: nn.Module) -> dict[str, Any]:
    """Count the private and the file-backed bytes of weights and gradients on the host."""
    tensors = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
    tensors = [t.detach() for t in tensors if is_on_host(t)]
    kept = [crc32(t.numpy()) for t in tensors]  # copies would count against the limit
    libc = ctypes.CDLL(None, use_errno=True)
    before = memory.resident().file_bytes
    private = 0
    for start, end, kinds in mappings(tensors):
        private += kinds["Anonymous"]
        address, length = ctypes.c_void_p(start), ctypes.c_size_t(end - start)
        if libc.madvise(address, length, DROP_PAGES):
            raise OSError(ctypes.get_errno(), "madvise")
    return {
        "host_bytes": sum(t.nbytes for t in tensors),
        "private_bytes": private,
        "dropped_bytes": before - memory.resident().file_bytes,
        "same_after": kept == [crc32(t.numpy()) for t in tensors],
    }


def train(task: dict[str, Any], found: dict[str, Any]) -> None:
    born = offcompile.host_init(spill=task["spill"]) if task["born"] else contextlib.nullcontext()
    with born:
        model = build(1024, 24)
    found["weights_bytes"] = sum(p.nbytes for p in model.parameters())
    forward = compiled(model, task, task["memory"])
    for seed in range(STEPS):
        loss = step(forward, model, seed)
        found["losses"].append(float(loss).hex())
        if seed == STEPS - 1:
            found["held"] = held(model)
        update(model)
    found["sum"] = float(sum(p.double().sum() for p in model.parameters())).hex()


def main() -> None:
    task = json.loads(sys.argv[1])
    # one where tests share the cores (conftest.py): two would wait for each other
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    freeze_imports()
    return_freed_memory()
    # a tiny one of its kind brings in code, threads and caches beforehand
    tiny = build(64, 2)
    forward = compiled(tiny, task, "minimum")
    for seed in range(2):
        step(forward, tiny, seed)
        update(tiny)
    torch._dynamo.reset()
    known = len(offcompile.reports())
    with Anonymous() as watched:
        if task["limit"] is not None:
            heap().trim()
            allowed = memory.data_bytes() + task["limit"]
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
            heap().prepare()  # as it is chosen where there is a limit from the beginning
        watched.peak_bytes = before = memory.resident().anon_bytes
        found: dict[str, Any] = {"losses": [], "error": None, "held": None, "sum": None}
        try:
            train(task, found)
        except (RuntimeError, MemoryError) as error:
            found["error"] = f"{type(error).__name__}: {error}"[:2000]
        watched.look()
    found["peak_bytes"] = watched.peak_bytes - before
    reports = offcompile.reports()[known:]
    found["planned_peak_bytes"] = max((r.planned_peak_bytes for r in reports), default=None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
