"""Sizes in graphs: numbers where symbols have become numbers."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from offcompile.graph.sizes import write_known_floats


def averaging() -> tuple[fx.GraphModule, torch.SymInt]:
    """A graph that divides by its rows, and how many of those there are."""
    traced = make_fx(lambda x: x.sum(0) * (1.0 / x.shape[0]), tracing_mode="symbolic")(
        torch.ones(6, 2)
    )
    (x, *_) = (n for n in traced.graph.nodes if n.op == "placeholder")
    return traced, x.meta["val"].shape[0]


def factor(traced: fx.GraphModule) -> object:
    (product,) = (n for n in traced.graph.nodes if n.target == torch.ops.aten.mul.Tensor)
    return product.args[1]


def test_a_float_of_an_open_size_stays_symbolic() -> None:
    traced, _ = averaging()
    write_known_floats(traced.graph)
    found = factor(traced)
    assert isinstance(found, fx.Node) and found.target == operator.truediv


def test_a_float_of_a_size_that_became_a_number_is_one() -> None:
    traced, rows = averaging()
    assert int(rows) == 6  # specializes the symbol
    write_known_floats(traced.graph)
    assert factor(traced) == pytest.approx(1 / 6)
    traced.graph.lint()
    traced.recompile()
    assert traced(torch.ones(6, 2)).tolist() == [1.0, 1.0]
