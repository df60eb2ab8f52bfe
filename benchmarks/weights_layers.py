"""A layer with its weight on the device, copied there first, or used in place on the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from offcompile.runtime.device.interface import Label
from offcompile.runtime.moves.registry import RuntimeSettings, runtime_for

MIB = 1 << 20
ROUNDS = 5


def layers() -> dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]]:
    """Name → the weight's shape, and the op on it."""
    torch.manual_seed(0)
    found: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Any]]] = {}
    for rows in (1, 16, 256):
        x, dy = torch.randn(rows, 2048), torch.randn(rows, 8192)
        found[f"Linear 2048 → 8192, {rows} rows"] = ((8192, 2048), partial(F.linear, x))
        found[f"its input gradient, {rows} rows"] = ((8192, 2048), partial(torch.matmul, dy))
    ids = torch.randint(50_000, (512,))
    found["Embedding 50,000 × 512, 512 rows"] = ((50_000, 512), lambda w: F.embedding(ids, w))
    image = torch.randn(8, 256, 28, 28)
    found["Conv 256 → 256, 3 × 3, 8 images of 28 × 28"] = (
        (256, 256, 3, 3),
        lambda w: F.conv2d(image, w, padding=1),
    )
    x = torch.randn(512, 4096)
    found["LayerNorm 4,096, 512 rows"] = ((4096,), lambda w: F.layer_norm(x, (4096,), w))
    return found


def rows(spill: str | None) -> list[str]:
    """One row of the table for each layer; every time is a median, all of them taken in turn."""
    settings = RuntimeSettings("cpu", (str(Path(spill or "/var/tmp")),), None)
    device = runtime_for(settings.key).device
    made = []
    for name, (shape, op) in layers().items():
        weight = torch.randn(shape)
        (flat,) = device.addressable([weight.nbytes])
        host = flat.view(weight.dtype).view(shape)
        host.copy_(weight)

        def copied(host: Tensor = host, op: Callable[[Tensor], Any] = op) -> Any:
            slot = device.slot_of(host)
            assert slot is not None
            target = device.allocate(slot, lambda: None)
            label = Label("load", "w")
            device.wait(device.copy_in("h2d", slot, target, (), label, lambda copy: None))
            return op(target.view(host.dtype).view(host.shape))

        ways: dict[str, Callable[[], Any]] = {
            "resident": partial(op, weight),
            "copied": copied,
            "in place": partial(op, host),
        }
        assert torch.equal(ways["copied"](), ways["resident"]()), name
        took: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, run in ways.items():
                began = time.perf_counter()
                run()
                took[way].append(time.perf_counter() - began)
        us = {way: 1e6 * statistics.median(t) for way, t in took.items()}
        made.append(
            f"| {name} | {weight.nbytes / MIB:,.1f} | {us['resident']:,.0f} | "
            f"{us['copied'] / us['resident']:.2f} | {us['in place'] / us['resident']:.2f} |"
        )
    return made
