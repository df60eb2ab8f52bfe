"""Graphs of the device, by the names and arguments that `torch.cuda` has."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_ROOM_BYTES = 512


class Graphs:
    """The library's calls; errors are raised as CUDA's are."""

    def __init__(self, native: ctypes.CDLL) -> None:
        text = (ctypes.c_char_p, ctypes.c_int64)
        native.queued_begin_capture.argtypes = (ctypes.c_int64, ctypes.c_int64, *text)
        native.queued_end_capture.argtypes = (ctypes.c_int64, *text)
        native.queued_replay.argtypes = (ctypes.c_int64, ctypes.c_int64, *text)
        native.queued_forget.argtypes = (ctypes.c_int64,)
        for name in ("pool", "begin_capture", "end_capture", "replay"):
            getattr(native, f"queued_{name}").restype = ctypes.c_int64
        self.native = native

    def call(self, name: str, *asked: int) -> int:
        said = ctypes.create_string_buffer(_ROOM_BYTES)
        found: int = getattr(self.native, f"queued_{name}")(*asked, said, _ROOM_BYTES)
        if found < 0:
            raise RuntimeError(said.value.decode())
        return found


class Graph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._number = 0

    def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
        assert capture_error_mode == "thread_local"
        stream = torch.accelerator.current_stream().stream_id
        self._number = self._graphs.call("begin_capture", stream, pool)

    def capture_end(self) -> None:
        self._graphs.call("end_capture", self._number)

    def replay(self) -> None:
        stream = torch.accelerator.current_stream().stream_id
        self._graphs.call("replay", self._number, stream)

    def reset(self) -> None:
        if self._number:
            self._graphs.native.queued_forget(self._number)
            self._number = 0

    def __del__(self) -> None:
        self.reset()


class Capturing:
    """Stands for `torch.cuda.graph`."""

    def __init__(
        self,
        cuda_graph: Graph,
        pool: int,
        stream: torch.Stream,
        capture_error_mode: str = "global",
    ) -> None:
        self._graph, self._pool, self._mode = cuda_graph, pool, capture_error_mode
        self._stream = torch.get_device_module().stream(stream)

    def __enter__(self) -> None:
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        self._stream.__enter__()
        self._graph.capture_begin(self._pool, capture_error_mode=self._mode)

    def __exit__(self, kind: object, *args: Any) -> None:
        # like torch's, which leaves the capture's stream in place if the end of it raises; CUDA
        # does that after calls that a capture forbids, and where lanes have not joined
        self._graph.capture_end()
        if kind is not None:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._stream.__exit__(kind, *args)
