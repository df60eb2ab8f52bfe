"""States on disk for tests: made, read, written and counted; their threads and open files."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from offcompile.runtime.states.disk_states import DiskStates
from offcompile.runtime.states.state_blocks import GRAIN

F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
#: with two fp32 parts: GRAIN elements
BLOCK = GRAIN * 8


Make = Callable[..., DiskStates]


def making(tmp_path: Path) -> Iterator[Make]:
    """Gives a function that makes states in a directory; closes them all in the end."""
    made: list[DiskStates] = []

    def one(host_bytes: int = 0, **more: object) -> DiskStates:
        given: dict[str, object] = {"block_bytes": BLOCK, "small_bytes": 0, **more}
        made.append(DiskStates([tmp_path], host_bytes, **given))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for states in made:
        states.close()


def values(states: DiskStates, key: int) -> list[torch.Tensor]:
    found = [[p.clone() for p in r.parts] for r in states.visit(key, write=False)]
    return [torch.cat(parts) for parts in zip(*found, strict=True)]


def put(states: DiskStates, key: int, wanted: Sequence[torch.Tensor]) -> None:
    for r in states.visit(key):
        for part, whole in zip(r.parts, wanted, strict=True):
            part.copy_(whole[r.start : r.stop])


def count(states: DiskStates, key: int, by: float = 1.0) -> None:
    for r in states.visit(key):
        for part in r.parts:
            part.add_(by)


def threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("offcompile-states")]


def files_open() -> int:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{name}"))
        except FileNotFoundError:  # the one that lists them
            continue
    return sum(link.endswith("(deleted)") for link in links)
