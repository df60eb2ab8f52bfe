"""The movement ops, as torch operators that graphs after AOTAutograd can hold.

Data edges alone order them: `wait_out` returns the ticket, `wait_load` the buffer, and `after` and
`barrier` add edges that carry no data. They are marked as having side effects, so none is
eliminated or merged with another, and they require their tensors in exactly the traced strides.
Importing this module defines them; importing it again does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from offcompile.ir import OffloadError
from offcompile.runtime.base.define import define
from offcompile.runtime.device import tickets

from .registry import runtime_for
from .saved import Load, Saved

SCHEMAS = {
    "start_out": "(Tensor x, str tag, str tier, str lane, str runtime, str? codec=None) -> Tensor",
    "wait_out": "(Tensor(a) ticket, Tensor? x) -> Tensor(a)",
    "start_load": "(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype, str tag, "
    "str lane, Tensor[] after, str device='cpu') -> (Tensor, Tensor)",
    "start_store": "(Tensor x, str tag, str tier, str lane, str runtime) -> Tensor",
    "host_of": "(Tensor ticket, SymInt[] size, SymInt[] stride, ScalarType dtype, "
    "str device='cpu') -> Tensor",
    "start_fetch": "(Tensor host, SymInt[] size, SymInt[] stride, ScalarType dtype, str tag, "
    "str lane, Tensor[] after, str runtime, str device='cpu') -> (Tensor, Tensor)",
    "wait_load": "(Tensor(a) buffer, Tensor load) -> Tensor(a)",
    "barrier": "(Tensor(a) y, Tensor[] tokens) -> Tensor(a)",
}


def _start_out(
    x: torch.Tensor, tag: str, tier: str, lane: str, runtime: str, codec: str | None = None
) -> torch.Tensor:
    return runtime_for(runtime).mover.start_out(x, tag, tier, lane, codec)


def _wait_out(ticket: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
    saved = tickets.find(ticket, Saved)
    saved.mover.wait_out(saved)
    return ticket


def _start_load(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    tag: str,
    lane: str,
    after: Sequence[torch.Tensor],
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    saved = tickets.find(ticket, Saved)
    nbytes = dtype.itemsize
    for length in size:
        nbytes *= length
    if nbytes != saved.slot.nbytes:
        raise OffloadError(
            f"{tag} cannot be loaded as {dtype} of size {tuple(size)}, {nbytes} bytes: "
            f"{saved.slot.nbytes} bytes were saved. Load it as it was saved."
        )
    buffer, load = saved.mover.start_load(saved, tag, lane)
    return buffer.view(dtype).as_strided(size, saved.stride_of(size, stride)), load


def _start_store(x: torch.Tensor, tag: str, tier: str, lane: str, runtime: str) -> torch.Tensor:
    return runtime_for(runtime).mover.start_store(x, tag, lane)


def _host_of(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> torch.Tensor:
    saved = tickets.find(ticket, Saved)
    if saved.host is None:
        raise OffloadError(f"{saved.tag} did not leave for host memory that ops can use in place.")
    return saved.host.view(dtype).as_strided(size, saved.stride_of(size, stride))


def _start_fetch(
    host: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    tag: str,
    lane: str,
    after: Sequence[torch.Tensor],
    runtime: str,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    buffer, load = runtime_for(runtime).mover.start_fetch(host, tag, lane)
    return buffer.view(dtype).as_strided(size, stride), load


def _wait_load(buffer: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    entry = tickets.find(load, Load)
    entry.mover.wait_load(entry)
    return buffer


def _barrier(y: torch.Tensor, tokens: Sequence[torch.Tensor]) -> torch.Tensor:
    return y


def _fake_start_out(
    x: torch.Tensor, tag: str, tier: str, lane: str, runtime: str, codec: str | None = None
) -> torch.Tensor:
    return tickets.fake_ticket()


def _fake_start_load(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    tag: str,
    lane: str,
    after: Sequence[torch.Tensor],
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_strided(size, stride, dtype=dtype, device=device), tickets.fake_ticket()


def _fake_host_of(
    ticket: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: str = "cpu",
) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _fake_start_fetch(
    host: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    tag: str,
    lane: str,
    after: Sequence[torch.Tensor],
    runtime: str,
    device: str = "cpu",
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_strided(size, stride, dtype=dtype, device=device), tickets.fake_ticket()


def _fake_first(y: torch.Tensor, other: Any) -> torch.Tensor:
    alias: torch.Tensor = torch.ops.aten.alias.default(y)
    return alias


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "start_out": (_start_out, _fake_start_out),
    "wait_out": (_wait_out, _fake_first),
    "start_load": (_start_load, _fake_start_load),
    "start_store": (_start_store, _fake_start_out),
    "host_of": (_host_of, _fake_host_of),
    "start_fetch": (_start_fetch, _fake_start_fetch),
    "wait_load": (_wait_load, _fake_first),
    "barrier": (_barrier, _fake_first),
}


for _name, _schema in SCHEMAS.items():
    define(_name, _schema, *_KERNELS[_name])

start_out = torch.ops.offcompile.start_out.default
wait_out = torch.ops.offcompile.wait_out.default
start_load = torch.ops.offcompile.start_load.default
start_store = torch.ops.offcompile.start_store.default
host_of = torch.ops.offcompile.host_of.default
start_fetch = torch.ops.offcompile.start_fetch.default
wait_load = torch.ops.offcompile.wait_load.default
barrier = torch.ops.offcompile.barrier.default
