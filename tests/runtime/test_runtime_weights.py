"""Weights fetched from, and gradients stored to, host memory that ops can use in place."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.moves import ops
from offcompile.runtime.moves.registry import Runtime, RuntimeSettings, close_all, runtime_for

SIZE, STRIDE = (300, 500), (500, 1)


@pytest.fixture
def key(tmp_path: Path) -> Iterator[str]:
    yield RuntimeSettings(directories=(str(tmp_path),)).key
    close_all()


@pytest.fixture
def runtime(key: str) -> Runtime:
    return runtime_for(key)


def on_host(runtime: Runtime) -> torch.Tensor:
    (flat,) = runtime.device.addressable([300 * 500 * 4])
    return flat.view(torch.float32).view(SIZE)


def fetch(host: torch.Tensor, key: str) -> torch.Tensor:
    both = ops.start_fetch(host, SIZE, STRIDE, torch.float32, "w in", "h2d", [], key)
    return ops.wait_load(*both)


def test_a_weight_is_fetched_as_it_stands(runtime: Runtime, key: str) -> None:
    weight = on_host(runtime).copy_(torch.randn(SIZE))
    copy = fetch(weight, key)
    assert torch.equal(copy, weight) and copy.data_ptr() != weight.data_ptr()
    with torch.no_grad():
        weight.add_(1.0)  # an update, in place on the host
    assert torch.equal(fetch(weight, key), copy + 1.0)
    # through a view of it too
    assert torch.equal(fetch(weight.detach()[:], key), weight)


def test_what_a_fetch_reads_outlives_its_parameter(runtime: Runtime, key: str) -> None:
    weight = on_host(runtime).fill_(2.0)
    both = ops.start_fetch(weight, SIZE, STRIDE, torch.float32, "w in", "h2d", [], key)
    del weight
    gc.collect()
    assert bool((ops.wait_load(*both) == 2.0).all())


def test_a_parameter_elsewhere_is_refused_by_name(runtime: Runtime, key: str) -> None:
    with pytest.raises(OffloadError, match=r"w in cannot be fetched.* change parameters between"):
        fetch(torch.ones(SIZE), key)


def test_a_gradient_is_stored_and_is_then_an_ordinary_tensor(runtime: Runtime, key: str) -> None:
    gradient = torch.randn(SIZE)
    ticket = ops.start_store(gradient, "g out", "host", "d2h", key)
    ops.wait_out(ticket, gradient)
    kept = ops.host_of(ticket, SIZE, STRIDE, torch.float32)
    del ticket
    gc.collect()
    assert torch.equal(kept, gradient) and runtime.device.slot_of(kept) is not None
    kept.add_(gradient)
    assert torch.equal(kept, 2 * gradient)
    fetched = fetch(kept, key)
    assert torch.equal(fetched, kept)


def test_transposed_gradients_keep_their_strides(key: str) -> None:
    gradient = torch.randn(500, 300).t()
    ticket = ops.start_store(gradient, "g out", "host", "d2h", key)
    ops.wait_out(ticket, gradient)
    kept = ops.host_of(ticket, gradient.shape, gradient.stride(), torch.float32)
    assert kept.stride() == gradient.stride() and torch.equal(kept, gradient)


def test_a_store_is_made_though_its_ticket_dies(runtime: Runtime, key: str) -> None:
    gradient = torch.randn(SIZE)
    ticket = ops.start_store(gradient, "g out", "host", "d2h", key)
    kept = ops.host_of(ticket, SIZE, STRIDE, torch.float32)
    del ticket
    gc.collect()
    runtime.device.drain()
    assert torch.equal(kept, gradient)


def test_a_ticket_for_elsewhere_has_no_host_memory(key: str) -> None:
    ticket = ops.start_out(torch.ones(SIZE), "a out", "host", "d2h", key)
    with pytest.raises(OffloadError, match="a out did not leave for host memory"):
        ops.host_of(ticket, SIZE, STRIDE, torch.float32)
