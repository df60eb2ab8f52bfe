"""Updates inside compiled backward graphs: gradients taken where they are made."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

import offcompile
from offcompile import OffloadError
from offcompile.runtime import updates

WIDTH = 64


class Descent:
    """Plain gradient descent during backward, and a note of how each gradient came."""

    def __init__(self, parameters: Iterable[torch.Tensor], lr: float = 0.1) -> None:
        self.parameters, self.lr = list(parameters), lr
        self.taken: list[int] = []
        self.brought: list[int] = []
        self.willing = True
        updates.register(self.parameters, self)
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.bring)

    def takes(self, parameter: torch.Tensor) -> bool:
        return self.willing

    def take(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        self.taken.append(self.index(parameter))
        self.descend(parameter, gradient)

    def held_bytes(self) -> int:
        return 0

    def index(self, parameter: torch.Tensor) -> int:
        return next(i for i, p in enumerate(self.parameters) if p is parameter)

    @torch.no_grad()
    def descend(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        parameter.add_(gradient, alpha=-self.lr)

    def bring(self, parameter: torch.Tensor) -> None:
        if not updates.arrived(parameter):
            return
        self.brought.append(self.index(parameter))
        if self.willing:
            assert parameter.grad is not None
            self.descend(parameter, parameter.grad)
            parameter.grad = None

    def step(self) -> None:
        self.taken.clear()
        self.brought.clear()


def mlp(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers)


def batches(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(32, WIDTH) for _ in range(count)]


def compiled(model: nn.Module, memory: object = "minimum", lowering: str = "aot_eager") -> nn.Module:
    torch._dynamo.reset()
    found: nn.Module = torch.compile(
        model, backend="offcompile", options={"memory": memory, "lowering": lowering}
    )
    return found


def plain_steps(model: nn.Module, inputs: list[torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for x in inputs:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_gradients_are_taken_from_the_second_step_on(lowering: str) -> None:
    model, reference = mlp(), mlp()
    optimizer = Descent(model.parameters())
    run = compiled(model, lowering=lowering)
    wanted = plain_steps(reference, batches(4))
    for i, x in enumerate(batches(4)):
        loss = run(x).square().mean()
        loss.backward()
        assert bool(optimizer.taken) == (i > 0)
        assert sorted(optimizer.taken + optimizer.brought) == list(range(8))
        assert all(p.grad is None for p in model.parameters())
        optimizer.step()
        if lowering == "aot_eager":
            assert loss.item() == wanted[i]
        else:
            assert loss.item() == pytest.approx(wanted[i], rel=1e-5)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if lowering == "aot_eager":
            assert torch.equal(ours, theirs)
        else:
            torch.testing.assert_close(ours, theirs)
