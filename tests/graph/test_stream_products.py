"""Products that stream their weight stand in for plain ones where they may, and mean the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from offcompile.graph import stream_products
from offcompile.graph.direct_ops import reader_of
from offcompile.runtime.kernels import stream_ops

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_products.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(stream_products, "why_not", lambda device, *dtypes: None)


def traced(
    function: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype
) -> fx.Node:
    """The last product of the function, traced on fake tensors."""
    with FakeTensorMode():
        module = make_fx(function)(*(torch.empty(s, dtype=dtype) for s in shapes))
    products = (aten.mm.default, aten.addmm.default)
    return [n for n in module.graph.nodes if n.target in products][-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_layer_streams_its_weight(dtype: torch.dtype) -> None:
    linear = torch.nn.functional.linear
    node = traced(linear, (8, 32), (16, 32), (16,), dtype=dtype)
    assert node.target is aten.addmm.default
    for hosted in ({2}, {0, 2}):
        found = reader_of(node, frozenset(hosted), "cuda", exact=False)
        assert found is stream_ops.stream_addmm
    node = traced(lambda dy, w: dy @ w, (8, 16), (16, 32), dtype=dtype)
    assert reader_of(node, frozenset([1]), "cuda", exact=False) is stream_ops.stream_mm


def test_nothing_stands_in_where_it_would_not_do() -> None:
    node = traced(torch.mm, (8, 16), (16, 32), dtype=torch.float32)
    assert reader_of(node, frozenset([1]), "cuda") is None, "to the last bit"
    assert reader_of(node, frozenset([1]), "cpu", exact=False) is None
    assert reader_of(node, frozenset([0]), "cuda", exact=False) is None
    double = traced(torch.mm, (8, 16), (16, 32), dtype=torch.float64)
    assert reader_of(double, frozenset([1]), "cuda", exact=False) is None
    scaled = traced(
        lambda c, a, b: torch.addmm(c, a, b, beta=2), (32,), (8, 16), (16, 32), dtype=torch.float32
    )
    assert reader_of(scaled, frozenset([2]), "cuda", exact=False) is None
    wide = traced(torch.addmm, (8, 32), (8, 16), (16, 32), dtype=torch.float32)
    assert reader_of(wide, frozenset([2]), "cuda", exact=False) is None


def test_an_old_card_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    node = traced(torch.mm, (8, 16), (16, 32), dtype=torch.float32)
    monkeypatch.setattr(stream_products, "why_not", lambda device, *dtypes: "sm_70 is too old")
    assert reader_of(node, frozenset([1]), "cuda", exact=False) is None


def test_without_a_kernel_they_are_torch_s_own() -> None:
    x, weight, bias = torch.randn(8, 32), torch.randn(16, 32), torch.randn(16)
    found = stream_ops.stream_addmm(bias, x, weight.t())
    assert torch.equal(found, torch.addmm(bias, x, weight.t()))
    assert torch.equal(stream_ops.stream_mm(found, weight), torch.mm(found, weight))
    with FakeTensorMode():
        made = stream_ops.stream_addmm(torch.empty(16), torch.empty(8, 32), torch.empty(32, 16))
    assert (made.shape, made.stride(), made.dtype) == ((8, 16), (16, 1), torch.float32)
