"""Frozen, tied, shared, unused, viewed and oddly laid out weights on the host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from weights_runs import (
    LAYERS,
    WIDTH,
    WORDS,
    Pair,
    batch,
    clean_slate,
    descend,
    loss_of,
    pair,
    results,
    same,
    some_steps,
    tokens,
)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


class LoRA(nn.Module):
    """A frozen base and small trainable parts."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.base.requires_grad_(False)
        self.a = nn.ParameterList(torch.randn(WIDTH, 24) * 0.1 for _ in range(2))
        self.b = nn.ParameterList(torch.zeros(24, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, a, b in zip(self.base, self.a, self.b, strict=True):
            x = torch.tanh(layer(x) + x @ a @ b)
        return x


def test_small_trainable_parts_on_a_frozen_base() -> None:
    names = {f"{part}.{i}" for part in ("a", "b", "base") for i in range(2)}
    same(some_steps, LoRA, {f"{n}.weight" if "base" in n else n for n in names})


def test_all_frozen_but_the_input() -> None:
    def build() -> nn.Module:
        return pair().requires_grad_(False)

    def train(forward: Any, model: nn.Module) -> list[Tensor]:
        x = batch(0).requires_grad_()
        loss_of(forward(x)).backward()
        assert x.grad is not None
        return [x.grad]

    same(train, build, LAYERS)


def test_a_parameter_frozen_and_thawed_in_between() -> None:
    def train(forward: Any, model: Pair) -> list[Tensor]:
        seen = []
        for step, frozen in enumerate((False, True, False)):
            model.up.weight.requires_grad_(not frozen)
            loss_of(forward(batch(step))).backward()
            assert (model.up.weight.grad is None) == frozen
            seen += results(model)
            descend(model)
        return seen

    same(train, hosted=LAYERS)


class Tied(nn.Module):
    """Embedding and head are one weight; one layer is used by two modules; one by none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([nn.Sequential(self.layer, nn.GELU()) for _ in range(2)])
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for part in self.parts:
            x = part(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), words.flatten())


def test_tied_shared_and_unused_parameters() -> None:
    def train(forward: Any, model: Tied) -> list[Tensor]:
        seen = []
        for step in range(3):
            loss = forward(tokens(step))
            loss.backward()
            seen += [loss.detach(), *results(model)]
            descend(model)
        assert model.head.weight is model.embedding.weight and model.idle.weight.grad is None
        return seen

    same(train, Tied, {"embedding.weight", "layer.weight"}, against="aot_eager")


class Views(nn.Module):
    """Looks at parameters through views: parts, a transposed one, a flat one that is cut up."""

    def __init__(self) -> None:
        super().__init__()
        self.three = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 8)
        self.table = nn.Parameter(torch.randn(2 * WIDTH, WIDTH) / 8)
        self.flat = nn.Parameter(torch.randn(WIDTH * WIDTH + WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (x @ part.t() for part in self.three.chunk(3))
        x = torch.tanh(query * key) + value @ self.table[: x.shape[0]].sum(0).diag()
        weight, bias = self.flat.split([WIDTH * WIDTH, WIDTH])
        return F.linear(x, weight.view(WIDTH, WIDTH).t(), bias)


def test_views_of_parameters() -> None:
    same(some_steps, Views, {"three", "table", "flat"}, against="aot_eager")


class Parts(nn.Module):
    """Two parameters that are parts of one tensor, as flattened models have them."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.randn(2 * WIDTH * WIDTH) / 8
        halves = flat.view(2, WIDTH, WIDTH).unbind()
        self.first, self.second = (nn.Parameter(half) for half in halves)
        self.third = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.first) @ self.second @ self.third


def test_parts_of_one_tensor_stay_together() -> None:
    def train(forward: Any, model: Parts) -> list[Tensor]:
        some_steps(forward, model)
        there = model.first.untyped_storage().data_ptr()
        assert model.second.untyped_storage().data_ptr() == there
        return []

    same(train, Parts, {"third"})


def convolutions() -> nn.Module:
    layers = (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    return nn.Sequential(*layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def test_weights_in_channels_last_and_buffers() -> None:
    def train(forward: Any, model: Any) -> list[Tensor]:
        seen = []
        for step in range(3):
            x = batch(step, 16 * 8).view(2, 16, 24, 8)
            loss = loss_of(forward(x.to(memory_format=torch.channels_last)))
            loss.backward()
            seen += [loss.detach(), *(p.grad for p in model.parameters())]
            descend(model)
        assert not model[0].weight.is_contiguous()
        return seen

    same(train, convolutions, {"0.weight", "3.weight"}, against="aot_eager")


def test_transposed_weights() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH).t())

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight)

    same(some_steps, Transposed, {"weight"})
