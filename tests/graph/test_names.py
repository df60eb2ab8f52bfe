"""Arguments, weights and gradients are called what their owner calls them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import offcompile
from offcompile.graph.names import plain_path
from offcompile.report.modes import module_of


@pytest.mark.parametrize(
    ("source", "path"),
    [
        ("L['self']._modules['up']._parameters['weight']", "up.weight"),
        ("L['fn']._modules['layers']._modules['0']._buffers['mean']", "layers.0.mean"),
        ("G['model']._modules['up']._parameters['weight']", "model.up.weight"),
        ("L['x']", "x"),
        ("L['batch']['ids']", "ids"),
        ("L['args'][0]", "0"),
        ("L['self'].scale", "scale"),
    ],
)
def test_paths_read_as_they_are_written(source: str, path: str) -> None:
    assert plain_path(source) == path


def test_the_module_of_a_parameter() -> None:
    assert module_of("layers.0.up.weight") == "layers.0.up"
    assert module_of("scale") == "(the model)"


def test_reports_speak_of_parameters_and_modules(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    options = {"memory": "minimum", "lowering": "aot_eager", "spill": tmp_path}
    torch.compile(model, backend="offcompile", options=options)(torch.randn(8, 64)).sum().backward()
    report = offcompile.reports()[-1]
    named = {
        report.problem.tensor[t].kind for t, name in report.names.items() if name == "0.weight"
    }
    assert named == {"weight", "gradient"}
    text = report.explain()
    assert "gradient of 2.weight 64×256 float32" in text
    told = {line.split("  ")[0].strip() for line in report.modules().splitlines()}
    assert told >= {"0", "2"} and "" not in told
    kinds = {line.split()[1] for line in report.modules().splitlines()}
    assert {"weight", "gradient"} <= kinds
    assert "in place on the host (DHA)" in report.modules()
