"""How fast updates go: ours in memory and from disk, torch's three, and what the machine can do."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offcompile import optim
from offcompile.runtime.disk.spill import SpillStore
from offcompile.runtime.memory.arena import Arena

#: p, g, m and v are read, p, m and v written
BYTES_PER_PARAMETER = 28
#: m and v are read from disk and written there
DISK_BYTES_PER_PARAMETER = 8
BLOCK_BYTES = 8 << 20
TENSOR_NUMEL = 4 << 20


class Bandwidth:
    """Memory: `a += b`, which reads two arrays and writes one. No cache holds them."""

    def __init__(self, numel: int) -> None:
        self.a, self.b = torch.zeros(numel), torch.ones(numel)

    def __call__(self) -> None:
        self.a.add_(self.b)

    @property
    def nbytes(self) -> int:
        return 12 * self.a.numel()


class Disk:
    """The disk by itself: as many bytes read as written, at the same time, past the page cache."""

    def __init__(self, numel: int, directory: str) -> None:
        self.count = max(2, numel * DISK_BYTES_PER_PARAMETER // BLOCK_BYTES)
        self.store = SpillStore([Path(directory)], None)
        self.extents = [self.store.allocate(BLOCK_BYTES) for _ in range(self.count)]
        arena = Arena(2 * BLOCK_BYTES)
        self.blocks = [arena.block(BLOCK_BYTES) for _ in range(2)]
        for extent in self.extents:
            self.store.write(extent, 0, self.blocks[0].view)

    def __call__(self) -> None:
        half = self.count // 2

        def read() -> None:
            for _ in range(2):
                for extent in self.extents[:half]:
                    self.store.read(extent, 0, self.blocks[1].view)

        thread = threading.Thread(target=read)
        thread.start()
        for _ in range(2):
            for extent in self.extents[half:]:
                self.store.write(extent, 0, self.blocks[0].view)
        thread.join()

    @property
    def nbytes(self) -> int:
        """Read, and written: each."""
        return 2 * (self.count // 2) * BLOCK_BYTES

    def close(self) -> None:
        self.store.close()


def rows(numel: int, rounds: int, directory: str) -> list[str]:
    """The table, as Markdown."""
    parameters = [
        nn.Parameter(torch.randn(min(TENSOR_NUMEL, numel - at)))
        for at in range(0, numel, TENSOR_NUMEL)
    ]
    for p in parameters:
        p.grad = torch.randn_like(p)
    memory, disk = Bandwidth(numel), Disk(numel, directory)
    ours: dict[str, Any] = {
        "ours, in memory": {"states": "device"},
        "ours, on the host (mapped)": {"states": "host", "directory": directory},
        "ours, on disk": {"states": "disk", "directory": directory},
    }
    variants: dict[str, Callable[[], object]] = {"memory": memory, "disk": disk}
    for name, where in ours.items():
        variants[name] = optim.AdamW(parameters, **where).step
    for name, how in (
        ("torch, fused", {"fused": True}),
        ("torch, foreach", {"foreach": True}),
        ("torch, for-loop", {"foreach": False, "fused": False}),
    ):
        variants[name] = torch.optim.AdamW(parameters, **how).step  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(rounds + 2):  # the first makes states, and the second touches them again
        for name, run in variants.items():
            began = time.perf_counter()
            run()
            if turn > 1:
                seconds[name].append(time.perf_counter() - began)
        print(f"  round {turn + 1} of {rounds + 2}", file=sys.stderr, flush=True)
    disk.close()

    def share(name: str, of: str, bytes_of: int, bytes_mine: int) -> float:
        """Rate over rate, in the rounds that they ran in together."""
        pairs = zip(seconds[name], seconds[of], strict=True)
        return statistics.median(bytes_mine / a / (bytes_of / b) for a, b in pairs)

    found = ["| | M parameters/s | of memory's rate | of the disk's |", "|---|---|---|---|"]
    for name in variants:
        if name in ("memory", "disk"):
            continue
        rate = numel / statistics.median(seconds[name]) / 1e6
        of_memory = share(name, "memory", memory.nbytes, numel * BYTES_PER_PARAMETER)
        of_disk = ""
        if name == "ours, on disk":
            mine = numel * DISK_BYTES_PER_PARAMETER
            of_disk = f"{share(name, 'disk', disk.nbytes, mine):.0%}"
        found.append(f"| {name} | {rate:,.0f} | {of_memory:.0%} | {of_disk} |")
    memory_gb = memory.nbytes / statistics.median(seconds["memory"]) / 1e9
    disk_gb = disk.nbytes / statistics.median(seconds["disk"]) / 1e9
    found += [
        "",
        f"Memory: {memory_gb:.1f} GB/s (`a += b`, 12 bytes an element). Disk: {disk_gb:.2f} GB/s"
        " read and as much written at the same time (direct, blocks of 8 MiB).",
    ]
    return found
