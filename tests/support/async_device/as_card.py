"""A plugin of pytest that runs tests of a GPU on the asynchronous device.

`python -m pytest -p async_device.as_card tests/gpu/test_gpu_weights.py`, in a process of its own.
Tests see another `torch`: its `cuda` is the device's module, and "cuda" names the device.
"""

from __future__ import annotations

import functools
import os
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from offcompile.runtime.memory import host_arena
from offcompile.runtime.memory.accelerators import Accelerator, add_accelerator

from . import NAME, Controls, register

#: a kernel of so many cycles takes a microsecond
CYCLES_PER_US = 2000
SEED = int(os.environ.get("ASYNC_DEVICE_SEED", "0"))
OPTIONS = {"hardware": str(Path(__file__).parent / "profile.toml"), "seconds": 0.3}


def ready(seed: int = 0) -> Controls:
    """Register the device with torch and with offcompile."""
    controls = register()
    add_accelerator(Accelerator(NAME, lambda: controls))
    controls.seed(seed)
    return controls


class OtherTorch(types.ModuleType):
    """torch, but for its `cuda`, and for devices and compilations that name that."""

    def __init__(self, controls: Controls) -> None:
        super().__init__("torch")
        self.cuda = Cuda(controls)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, kind: Any, *index: int) -> torch.device:
        return torch.device(kind.replace("cuda", NAME) if isinstance(kind, str) else kind, *index)

    def compile(self, model: Any, *, backend: Any, options: Any = None, **asked: Any) -> Any:
        if backend == "offcompile":
            options = {**OPTIONS, **(options or {})}
        return torch.compile(model, backend=backend, options=options, **asked)


class Cuda(types.ModuleType):
    """The device's module, with what tests ask of `torch.cuda` beyond it."""

    def __init__(self, controls: Controls) -> None:
        super().__init__("torch.cuda")
        self.controls = controls
        self._module = torch.get_device_module(NAME)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def _sleep(self, cycles: int) -> None:
        self.controls.sleep(cycles / CYCLES_PER_US)

    def default_stream(self, device: object = None) -> torch.Stream:
        kind = torch.accelerator.current_stream().device_type
        return torch.Stream(stream_id=0, device_index=0, device_type=kind)

    def get_device_properties(self, device: object) -> types.SimpleNamespace:
        return types.SimpleNamespace(total_memory=self._whole_bytes)

    def set_per_process_memory_fraction(self, share: float, device: object) -> None:
        self.controls.limit(int(share * self._whole_bytes))

    @functools.cached_property
    def _whole_bytes(self) -> int:
        return int(self._module.mem_get_info()[1])


@functools.cache
def other_torch() -> OtherTorch:
    controls = ready(SEED)
    # arenas that tests make for themselves pin for this device too
    host_arena.CudaRegistrar = lambda: controls  # type: ignore[assignment,misc]
    return OtherTorch(controls)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    other = other_torch()
    for item in items:
        assert isinstance(item, pytest.Function)
        item.module.torch = other  # type: ignore[attr-defined]
        for node in item.listchain():
            node.own_markers = [m for m in node.own_markers if m.name not in ("skipif", "gpu")]
        if hasattr(item, "callspec"):
            params = item.callspec.params
            if str(params.get("device", "")).startswith("cuda"):
                params["device"] = f"{NAME}:0"
