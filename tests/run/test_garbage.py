"""Python's collector is called where something can have come for it, and not otherwise."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from zoo import MLP

import offcompile
from offcompile.run.accounts.process import process
from offcompile.runtime.base.interpreter import Garbage

ROWS, WIDTH, DEPTH = 512, 64, 6


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[None]]:
    """One entry for each that we ask for."""
    found: list[None] = []
    collect = process.garbage.collect

    def counted() -> None:
        found.append(None)
        collect()

    collect()
    monkeypatch.setattr(process.garbage, "collect", counted)
    gc.disable()  # it would do by itself, some time
    yield found
    gc.enable()


def compiled(model: nn.Module, memory: int | str) -> Callable[..., Any]:
    # costs that are reckoned, so that plans are the same wherever they are made
    options = {"memory": memory, "lowering": "aot_eager", "seconds": 0.1, "hardware": "cpu"}
    return torch.compile(model, backend="offcompile", options=options)


def train(run: Callable[..., Any]) -> None:
    run(torch.ones(ROWS, WIDTH)).square().mean().backward()


def test_each_is_called_for_once() -> None:
    calls: list[None] = []

    class Counted(Garbage):
        def collect(self) -> None:
            calls.append(None)
            super().collect()

    garbage = Counted()
    garbage.collect_models()
    garbage.collect_models()
    garbage.collect_of_compiling()
    assert len(calls) == 1
    garbage.ran()
    garbage.collect_of_compiling()
    assert len(calls) == 1
    garbage.collect_models()
    assert len(calls) == 2
    garbage.compiled()
    garbage.collect_models()
    assert len(calls) == 2
    garbage.collect_of_compiling()
    assert len(calls) == 3


def test_of_a_graph_s_compilation_once_although_it_has_two_halves(collections: list[None]) -> None:
    torch._dynamo.reset()
    known = len(offcompile.reports())
    run = compiled(MLP(WIDTH, DEPTH), "minimum")
    for _ in range(3):
        train(run)
    # the steps may have brought another plan
    assert len(collections) == len(offcompile.reports()) - known


def test_block_by_block_once_for_each(collections: list[None]) -> None:
    torch._dynamo.reset()
    blocks = [MLP(WIDTH, 2 + i) for i in range(4)]
    alone = [compiled(block, "minimum") for block in blocks]
    for run in alone:  # what each takes by itself, and their kinds in Dynamo's books
        train(run)
    peaks = [report.planned_peak_bytes for report in offcompile.reports()[-4:]]
    torch._dynamo.reset()
    collections.clear()
    x = torch.ones(ROWS, WIDTH, requires_grad=True)
    y = x
    for run in [compiled(block, 3 * sum(peaks)) for block in blocks]:
        y = run(y)
    y.square().mean().backward()
    assert len(collections) <= len(blocks) + 1


def test_a_model_whose_backward_nobody_will_call_is_in_nobody_s_way(
    collections: list[None],
) -> None:
    """It is taken for one that waits, until there is no plan beside it."""
    torch._dynamo.reset()
    first, second = MLP(WIDTH, DEPTH), MLP(WIDTH, DEPTH)
    train(compiled(second, "minimum"))
    memory = int(1.5 * offcompile.reports()[-1].planned_peak_bytes)
    torch._dynamo.reset()
    run = compiled(first, memory)
    loss = run(torch.ones(ROWS, WIDTH)).square().mean()
    cycle: list[Any] = [loss, run, first]
    cycle.append(cycle)
    gone, before = weakref.ref(first), len(collections)
    del loss, run, first, cycle
    train(compiled(second, memory))
    assert len(collections) > before
    assert gone() is None


def test_nor_in_that_of_a_graph_that_has_its_plan(collections: list[None]) -> None:
    torch._dynamo.reset()
    first, second = MLP(WIDTH, DEPTH - 1), MLP(WIDTH, DEPTH)  # the first is compiled in between
    train(compiled(second, "minimum"))
    memory = int(1.15 * offcompile.reports()[-1].planned_peak_bytes)
    torch._dynamo.reset()
    trained = compiled(second, memory)
    for _ in range(4):  # until the steps bring no other plan
        train(trained)
    run = compiled(first, memory)
    loss = run(torch.ones(ROWS, WIDTH)).square().mean()
    cycle: list[Any] = [loss, run, first]
    cycle.append(cycle)
    gone, known = weakref.ref(first), len(offcompile.reports())
    del loss, run, first, cycle
    train(trained)
    assert gone() is None
    assert len(offcompile.reports()) == known
