"""Nested (jagged) inputs: their lengths are told by the tensors that they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lengths import some
from torch import Tensor, nn
from weights_runs import clean_slate, on_host, seeded

import offcompile

WIDTH = 64
LENGTHS = ((3, 50, 70), (20, 31, 9), (100, 2, 30), (200, 100, 60), (3, 50, 70))
OPTIONS = {"lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    yield from clean_slate()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.one, self.two = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.three, self.four = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        x = x + self.two(torch.relu(self.one(x)))
        return x + self.four(torch.relu(self.three(x)))


def jagged(seed: int, lengths: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(n, WIDTH, generator=generator) for n in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged)


def train(memory: str | None) -> tuple[list[Tensor], nn.Module]:
    torch._dynamo.reset()
    model = seeded(Net)
    how: dict[str, Any] = {"backend": "aot_eager"}
    if memory is not None:
        how = {"backend": "offcompile", "options": {"memory": memory, **OPTIONS}}
    forward, seen = torch.compile(model, **how), []
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for seed, lengths in enumerate(LENGTHS):
        loss = forward(jagged(seed, lengths)).values().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    with torch.no_grad():
        seen.append(forward(jagged(9, (5, 6))).values())
    return [*seen, *(p.detach().clone() for p in model.parameters())], model


@pytest.mark.parametrize("memory", some(["minimum", "2MiB", "400MiB"], "minimum", "400MiB"))
def test_jagged_tensors_train_as_they_do_plainly(memory: str) -> None:
    expected, _ = train(None)
    found, model = train(memory)
    assert all(map(torch.equal, found, expected))
    trained = [r for r in offcompile.reports() if any(o.phase == "backward" for o in r.problem.ops)]
    assert trained
    if memory == "minimum":
        assert on_host(model) and any(r.plan.moves for r in trained)


def test_a_budget_holds_for_lengths_that_come_later() -> None:
    """Longer batches get a plan of their own: what is short fits, what is long has to move."""
    found, _ = train("2MiB")
    assert found
    moving = [r for r in offcompile.reports() if not r.fits]
    assert any(r.fits for r in offcompile.reports()) and moving
