"""The device module that torch knows as `torch.queued`, and its registration."""

from __future__ import annotations

import atexit
import ctypes
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .build import library
from .graphs import Capturing, Graph, Graphs

NAME = "queued"
_ROOM_BYTES = 1 << 16


class Controls:
    """Lets tests seed, slow down and inspect the device, which torch has no calls for."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self._native = native
        native.queued_seed.argtypes = (ctypes.c_uint64, ctypes.c_double)
        native.queued_slow.argtypes = (ctypes.c_int64, ctypes.c_double)
        native.queued_sleep.argtypes = (ctypes.c_double,)
        native.queued_limit.argtypes = (ctypes.c_size_t,)
        native.queued_pin.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        native.queued_unpin.argtypes = (ctypes.c_void_p,)
        native.queued_stall.argtypes = native.queued_resume.argtypes = (ctypes.c_int64,)
        native.queued_waits.argtypes = (ctypes.c_char_p, ctypes.c_int64)
        for name in ("pin", "unpin", "stall", "waits"):
            getattr(native, f"queued_{name}").restype = ctypes.c_int64

    def seed(self, seed: int, longest_us: float = 300.0) -> None:
        """Draw delays before kernels from a seed; 0: none. Each stream is quick, slow, or mixed."""
        self._native.queued_seed(seed, longest_us)

    @contextmanager
    def slow(self, stream: torch.Stream, us: float) -> Iterator[None]:
        """Inside, each kernel of the stream waits that long before it runs."""
        self._native.queued_slow(stream.stream_id, us)
        try:
            yield
        finally:
            self._native.queued_slow(stream.stream_id, 0.0)

    def sleep(self, us: float) -> None:
        """Queue a kernel on the current stream that takes this long and does nothing."""
        self._native.queued_sleep(us)

    def limit(self, nbytes: int) -> None:
        """Bound what the allocator may reserve."""
        self._native.queued_limit(nbytes)

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory: kernels and asynchronous copies may use it. Returns 0: success."""
        return int(self._native.queued_pin(address, nbytes))

    def unregister(self, address: int) -> int:
        torch.accelerator.synchronize()
        return int(self._native.queued_unpin(address))

    @contextmanager
    def stalled(self, stream: torch.Stream) -> Iterator[None]:
        """Inside, the stream runs nothing that is queued from now on."""
        number = self._native.queued_stall(stream.stream_id)
        try:
            yield
        finally:
            self._native.queued_resume(number)

    def waits(self) -> dict[str, int]:
        """How often each op made the host wait, since its shapes were not known without running."""
        text = ctypes.create_string_buffer(_ROOM_BYTES)
        nbytes = self._native.queued_waits(text, _ROOM_BYTES)
        told = text.raw[:nbytes].decode()
        return {name: int(count) for name, count in map(str.split, told.splitlines())}


def register() -> Controls:
    """Make the device torch's accelerator, in this process and for good.

    Call it before the first backward: autograd starts one thread for each device known then.
    """
    native = ctypes.CDLL(str(library()))
    native.queued_random_state.restype = ctypes.c_int64
    native.queued_random_state.argtypes = (ctypes.c_void_p, ctypes.c_bool)
    native.queued_manual_seed.argtypes = (ctypes.c_uint64,)
    native.queued_start()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(native))
    torch.utils.generate_methods_for_privateuse1_backend()
    _fused_cells()
    atexit.register(native.queued_end)
    return Controls(native)


def _module(native: ctypes.CDLL) -> types.ModuleType:
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.__doc__ = "An asynchronous device for tests, on threads of the host."
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module._lazy_init = lambda: None
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.device, module.stream = _there, _on
    module.Stream, module.Event = torch.Stream, torch.Event
    for name in (
        *("current_stream", "set_stream", "synchronize", "empty_cache", "memory_stats"),
        *("memory_allocated", "memory_reserved", "max_memory_allocated", "max_memory_reserved"),
        "reset_peak_memory_stats",
    ):
        setattr(module, name, getattr(torch.accelerator, name))
    module.mem_get_info = torch.accelerator.get_memory_info
    graphs = Graphs(native)
    module.CUDAGraph, module.graph = partial(Graph, graphs), Capturing
    module.graph_pool_handle = native.queued_pool
    module.manual_seed = module.manual_seed_all = native.queued_manual_seed
    module.get_rng_state = partial(_random_state, native)
    module.set_rng_state = partial(_set_random_state, native)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _fused_cells() -> None:
    """The LSTM cell that torch takes on devices other than the CPU, whose kernel the CPU lacks."""
    made = torch.library.Library("aten", "IMPL", "PrivateUse1")
    made.impl("_thnn_fused_lstm_cell", _lstm_cell)
    made.impl("_thnn_fused_lstm_cell_backward_impl", _lstm_cell_backward)
    _libraries.append(made)


# a library's kernels die with it
_libraries: list[torch.library.Library] = []


def _lstm_cell(
    inputs: Tensor, hidden: Tensor, cx: Tensor, *biases: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gates = inputs + hidden
    for bias in biases:
        gates = gates if bias is None else gates + bias
    i, f, c, o = gates.chunk(4, 1)
    i, f, c, o = i.sigmoid(), f.sigmoid(), c.tanh(), o.sigmoid()
    cy = f * cx + i * c
    return o * cy.tanh(), cy, torch.cat([i, f, c, o], 1)


def _lstm_cell_backward(
    grad_hy: Tensor | None,
    grad_cy: Tensor | None,
    cx: Tensor,
    cy: Tensor,
    workspace: Tensor,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    i, f, c, o = workspace.chunk(4, 1)
    hy = torch.zeros_like(cy) if grad_hy is None else grad_hy
    out = cy.tanh()
    to_cy = hy * o * (1 - out * out)
    to_cy = to_cy if grad_cy is None else to_cy + grad_cy
    parts = (
        to_cy * c * i * (1 - i),
        to_cy * cx * f * (1 - f),
        to_cy * i * (1 - c * c),
        hy * out * o * (1 - o),
    )
    gates = torch.cat(parts, 1)
    return gates, to_cy * f, gates.sum(0) if has_bias else None


def _there(device: object) -> AbstractContextManager[None]:
    """There is one device, and it is always the current one."""
    return nullcontext()


@contextmanager
def _on(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


def _random_state(native: ctypes.CDLL, device: object = None) -> torch.Tensor:
    state = torch.empty(native.queued_random_state(None, False), dtype=torch.uint8, device="cpu")
    native.queued_random_state(state.data_ptr(), False)
    return state


def _set_random_state(native: ctypes.CDLL, state: torch.Tensor, device: object = None) -> None:
    native.queued_random_state(state.data_ptr(), True)
