"""A compiled step runs in the planned order; a disk that fails ends it and loses nothing."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from captured import Perceptron
from lengths import some
from torch import nn

import offcompile
from offcompile.ir import DEVICE, OffloadError
from offcompile.planning.order import StartStep, WaitStep, static_order
from offcompile.runtime.base.counters import record
from offcompile.runtime.disk.spill_file import Files
from offcompile.runtime.moves.registry import close_all, runtimes

OPTIONS = {"hardware": "cpu", "policy": "joint:evaluations=10,seconds=20", "seconds": 0.5}


def compiled(model: nn.Module, spill: Path, **more: Any) -> Any:
    torch._dynamo.reset()
    options = {**OPTIONS, "spill": spill, "lowering": "aot_eager", **more}
    return torch.compile(model, backend="offcompile", options=options)


@pytest.mark.parametrize("lowering", some(["aot_eager", "inductor"], "aot_eager"))
def test_moves_start_and_are_awaited_in_the_planned_order(lowering: str, tmp_path: Path) -> None:
    model, x = Perceptron(64, 3), torch.randn(2048, 64)
    run = compiled(model, tmp_path, memory="minimum", lowering=lowering)
    run(x).backward()
    report = offcompile.reports()[-1]
    with record() as recording:
        run(x).backward()
    order = static_order(report.problem, report.machine, report.plan, report.timeline)
    moves = {m.id: m for m in report.plan.moves}
    wanted = [
        (
            ("start" if isinstance(step, StartStep) else "wait")
            + ("_out" if moves[step.move].source == DEVICE else "_load"),
            step.move,
        )
        for step in order.steps
        if isinstance(step, StartStep | WaitStep)
    ]
    assert wanted and recording.ops() == wanted


class Disk:
    """Makes every write, or every read, of the open runtimes fail from now on."""

    def __init__(self, error: int) -> None:
        self.error = error
        self.kept: list[tuple[Any, Files]] = []

    def fail(self, *_: Any) -> int:
        raise OSError(self.error, "the disk does not want to")

    def breaks(self, **which: Callable[..., Any]) -> None:
        for runtime in runtimes():
            for store in runtime.stores.values():
                for file in store._files:
                    self.kept.append((file, file._files))
                    file._files = replace(file._files, **which)

    def mended(self) -> None:
        for file, files in self.kept:
            file._files = files
        self.kept.clear()


@pytest.mark.parametrize(
    ("error", "what"),
    [(errno.ENOSPC, "pwritev"), (errno.EIO, "pwritev"), (errno.EIO, "preadv")],
)
def test_a_disk_that_fails_fails_the_step_and_loses_nothing(
    error: int, what: str, tmp_path: Path
) -> None:
    close_all()
    model, x = Perceptron(64, 6), torch.randn(4096, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = run(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = compiled(model, tmp_path, memory="6MiB")
    step()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    disk = Disk(error)
    disk.breaks(**{what: disk.fail})
    with pytest.raises(OffloadError) as raised:
        step()
    assert str(tmp_path) in str(raised.value)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    del raised
    gc.collect()
    # when the disk is well again, training goes on where it was
    disk.mended()
    loss = step()
    assert torch.isfinite(loss)
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0
    assert offcompile.counters()["spill_bytes"] == 0


def test_an_exception_in_backward_leaves_nothing_behind(tmp_path: Path) -> None:
    model, x = Perceptron(64, 6), torch.randn(4096, 64)
    run = compiled(model, tmp_path, memory="6MiB")
    hook = model.layers[0].weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(x).backward()
    hook.remove()
    model.zero_grad()
    loss = run(x)
    loss.backward()
    del loss
    gc.collect()
    assert offcompile.counters()["live_tickets"] == 0


def test_several_directories_share_what_leaves(tmp_path: Path) -> None:
    close_all()
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    model, x = Perceptron(512, 6), torch.randn(8192, 512)
    run = compiled(model, [str(first), str(second)], memory="minimum")  # type: ignore[arg-type]
    run(x).backward()
    (runtime,) = runtimes()
    assert {str(f.directory) for f in runtime.stores["host"]._files} == {str(first), str(second)}
    assert all(f.size_bytes > 0 for f in runtime.stores["host"]._files)
