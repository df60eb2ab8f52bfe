"""Builds, saves and loads a model whose weights exceed what the process may hold.

`python host_init_child.py '{"born": true, "limit": bytes, "directory": …}'` prints one JSON
object. `born`: whether the model is built within `host_init`. `limit` allows that many bytes of
private memory beyond what the process has before the model is built.
"""

from __future__ import annotations

import json
import resource
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offcompile
from offcompile.runtime.base import process_memory as memory
from offcompile.runtime.memory.malloc.glibc import return_freed_memory

WIDTH, LAYERS = 2048, 8


def build(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))


def write_safetensors(model: nn.Module, path: Path) -> None:
    tensors = model.state_dict()
    header, at = {}, 0
    for name, value in tensors.items():
        end = at + value.nbytes
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in tensors.values():
            file.write(value.numpy().data)


def live(task: dict[str, Any], found: dict[str, Any]) -> None:
    folder = Path(task["directory"])
    inside = offcompile.host_init("cpu", spill=folder) if task["born"] else nullcontext()
    before = memory.resident().anon_bytes

    def grown(stage: str) -> None:
        found["anon_bytes"][stage] = memory.resident().anon_bytes - before

    with inside:
        model = build(WIDTH, LAYERS)
        grown("build")
        write_safetensors(model, folder / "model.safetensors")
        torch.save(model.state_dict(), folder / "model.pt")
        grown("save")
        other = build(WIDTH, LAYERS)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        offcompile.load_weights(other, folder / "model.safetensors")
        grown("load safetensors")
        found["equal"] = equal(model, other)
        # torch maps such files privately, which counts as data though its pages are the file's
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        offcompile.load_weights(other, folder / "model.pt")
        grown("load torch")
        found["equal"] = found["equal"] and equal(model, other)
        other.load_state_dict(torch.load(folder / "model.pt", mmap=True), assign=True)
        grown("assign")
        found["equal"] = found["equal"] and equal(model, other)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    # a row at a time: comparing makes a temporary
    return all(torch.equal(a, b) for p, q in pairs for a, b in zip(p, q, strict=True))


def main() -> None:
    task = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    return_freed_memory()
    with offcompile.host_init("cpu", spill=task["directory"]):
        build(512, 1)(torch.ones(1, 512))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (memory.data_bytes() + task["limit"], hard))
    found: dict[str, Any] = {"anon_bytes": {}, "equal": False, "error": None}
    try:
        live(task, found)
    except (RuntimeError, MemoryError) as error:
        found["error"] = f"{type(error).__name__}: {error}"[:2000]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
