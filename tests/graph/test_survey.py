"""Facts about a step that are known before it is planned."""

from __future__ import annotations

import torch
from captured import Perceptron, capture

from offcompile.graph.sizes import hint_of
from offcompile.run.problem_source import standing_bytes


def test_what_backward_will_be_given_does_not_stand_yet() -> None:
    """Else no room would be left to measure large ops in, under the budgets that matter."""
    model, x = Perceptron(64, 3), torch.randn(4096, 64)
    (graphs,) = capture(model, x)
    weights = sum(p.nbytes for p in model.parameters())
    assert standing_bytes(graphs, hint_of(), "cpu") == weights + x.nbytes
    assert standing_bytes(graphs, hint_of(), "cuda") == 0


def test_tensors_of_one_memory_stand_once() -> None:
    def scaled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sum()

    whole = torch.randn(100, 100)
    (graphs,) = capture(scaled, whole[:50], whole[50:])
    assert standing_bytes(graphs, hint_of(), "cpu") == whole.nbytes
