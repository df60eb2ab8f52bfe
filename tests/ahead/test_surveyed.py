"""Graphs of a model are annotated once, however often they are planned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offcompile.ahead.plan import Ahead, ForecastRequest
from offcompile.graph import annotate, mask_bits
from offcompile.machine.options import Options
from offcompile.run import problem_source

WIDTH, ROWS, LAYERS = 256, 2048, 6
HARDWARE = "rtx4090"


def quiet(text: str) -> None:
    """Nobody listens."""


def ahead(hardware: str | None) -> Ahead:
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
        model, rows = nn.Sequential(*layers), torch.zeros(ROWS, WIDTH)
    options = Options.read(
        {"hardware": hardware, "lowering": "aot_eager", "seconds": 0.3, "reuse_plans": False}
    )
    measures = hardware is None
    asked = ForecastRequest(model, (rows,), {}, options, torch.sum, measures=measures)
    return Ahead.of(asked, quiet)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions below, one per call."""
    calls: list[str] = []

    def counting(name: str, plain: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            calls.append(name)
            return plain(*given, **named)

        return call

    for name, plain in (("annotate", annotate.annotate), ("compact", mask_bits.compact)):
        monkeypatch.setattr(problem_source, name, counting(name, plain))
    return calls


def test_a_model_that_is_planned_again_is_not_annotated_again(counted: list[str]) -> None:
    one = ahead(HARDWARE)
    first = one.choose_whole("minimum", quiet)
    assert "annotate" in counted and "compact" in counted
    assert first.rewrites.bits
    counted.clear()
    again = one.choose_whole("minimum", quiet)
    assert counted == []
    assert again.graphs is first.graphs
    assert again.choice.annotated.problem == first.choice.annotated.problem


def test_costs_that_are_measured_depend_on_the_budget(counted: list[str]) -> None:
    one = ahead(None)
    one.choose_whole("minimum", quiet)
    counted.clear()
    one.choose_whole("minimum", quiet)
    assert "annotate" in counted
