"""Gradients that arrive on the CPU target: a copy to the mapped file is waited for by itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offcompile.ir import OffloadError
from offcompile.runtime.device import mapped, tickets
from offcompile.runtime.moves.registry import Runtime, RuntimeSettings
from offcompile.runtime.moves.saved import Load, Saved
from offcompile.runtime.states.update_workers import UpdateWorkers


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    made = Runtime(RuntimeSettings(directories=(str(tmp_path),)))
    yield made
    made.close()


def sent(runtime: Runtime, gradient: torch.Tensor) -> torch.Tensor:
    host = tickets.find(runtime.mover.start_store(gradient, "layer.0.weight", "d2h"), Saved).host
    assert host is not None
    return host.view(gradient.dtype)


def test_a_channel_waits_for_the_copy_and_not_for_its_lane(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = torch.full((5000,), 2.0), torch.full((7000,), 3.0)
    open_, really = threading.Event(), mapped.MappedSlot.write

    def write(slot: mapped.MappedSlot, start: int, view: memoryview) -> None:
        if slot.nbytes == second.nbytes:
            open_.wait()
        really(slot, start, view)

    monkeypatch.setattr(mapped.MappedSlot, "write", write)
    device, channels, sums = runtime.device, UpdateWorkers(), list[float]()
    for gradient in (first, second):
        host = sent(runtime, gradient)
        arrive = device.await_on_host([host])
        job = channels.submit(arrive, lambda h=host: sums.append(float(h.sum())), "w")
        if gradient is first:
            job.wait()
            assert sums == [10000.0]
    open_.set()
    channels.settle()
    assert sums == [10000.0, 21000.0]
    channels.close()


def test_what_did_not_arrive_is_told(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(slot: mapped.MappedSlot, start: int, view: memoryview) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(mapped.MappedSlot, "write", fail)
    host = sent(runtime, torch.ones(5000))
    with pytest.raises(OffloadError, match=r"layer\.0\.weight did not arrive.*no such disk"):
        runtime.device.await_on_host([host])()


def test_the_processor_sees_its_own_memory_and_holds_work_there_too(runtime: Runtime) -> None:
    (flat,) = runtime.device.addressable([400])
    weight, calls = flat.view(torch.float32), list[str]()
    assert runtime.device.on_host(weight).data_ptr() == weight.data_ptr()
    weight.fill_(1.0)
    runtime.device.hold(weight, lambda: calls.append(str(weight.add_(1.0).sum().item())))
    buffer, load = runtime.mover.start_fetch(flat, "w", "h2d")
    runtime.mover.wait_load(tickets.find(load, Load))
    assert calls == ["200.0"] and bool((buffer.view(torch.float32) == 2.0).all())
