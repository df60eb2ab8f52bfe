"""Packs with `TorchStreams` and its kernels, without a GPU: `TRITON_INTERPRET=1 python …`.

It leaves out streams and aliases, and uses the processor's memory. It prints one line of JSON for
each case.
"""

from __future__ import annotations

import json
import threading
from contextlib import nullcontext
from unittest import mock

import interpreter_rounding
import torch

from offcompile.runtime.codecs import codec
from offcompile.runtime.device.cuda.packing import used_bytes
from offcompile.runtime.device.streams import TorchStreams

assert interpreter_rounding.KNOWN

CASES = [
    ("bitmask", torch.float32),
    ("bitmask", torch.uint8),
    ("bitmask", torch.complex128),
    ("bitmask+bf16", torch.float32),
    ("fp16", torch.float32),
]


class Here(TorchStreams):
    """The processor in place of a card. `aliased`: as if the packed side lay in host memory."""

    def __init__(self, aliased: bool) -> None:
        self.device, self._index = torch.device("cpu"), 0
        self._module = torch.cuda
        self._packing, self._workspaces = threading.Lock(), {}
        self.aliased = aliased

    def _near(self, packed: torch.Tensor) -> torch.Tensor:
        return packed[:] if self.aliased else packed


def go(name: str, dtype: torch.dtype, numel: int, aliased: bool) -> str | None:
    kind, streams = codec(name), Here(aliased)
    x = torch.randn(numel).relu().mul(9).to(dtype)
    room = torch.zeros(kind.worst_bytes(numel, dtype) + 16, dtype=torch.uint8)
    room = room[-room.data_ptr() % 16 :][:-16]
    want = torch.zeros_like(room)
    size = kind.pack(x, want)
    streams.pack("lane", kind, x, room)  # type: ignore[arg-type]
    if used_bytes(kind, room, numel, dtype) != size:
        return f"says {used_bytes(kind, room, numel, dtype)} bytes and not {size}"
    if not torch.equal(room[:size], want[:size]):
        return "packs other bytes than the processor"
    ours, theirs = torch.full_like(x, 7), torch.empty_like(x)
    streams.unpack("lane", kind, room, ours)  # type: ignore[arg-type]
    kind.unpack(want, theirs)
    return None if torch.equal(ours, theirs) else "unpacks something else"


with mock.patch.object(torch.cuda, "stream", lambda stream: nullcontext()):
    for name, dtype in CASES:
        for aliased in (True, False):
            wrong = go(name, dtype, 128 * 3 + 5, aliased)
            print(json.dumps([f"{name} {dtype} {aliased}", wrong]), flush=True)
