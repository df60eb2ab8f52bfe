"""Graphs whose plans exercise every way in which a graph is rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from weights_runs import seeded
from zoo import GPT

import offcompile
from offcompile.optim import AdamW
from offcompile.report.report import PlanReport

WORDS, LENGTH = 96, 32
OPTIONS = {"lowering": "aot_eager", "seconds": 0.05}


class Mlp(nn.Module):
    def __init__(self, between: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.between = between
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.dropout(self.between(layer(x)), 0.1)
        return x.square().mean()


def words() -> Tensor:
    return torch.randint(0, WORDS, (4, LENGTH + 1), generator=torch.Generator().manual_seed(3))


def gpt() -> nn.Module:
    return GPT(WORDS, 128, 1, 4, LENGTH)


#: name → the model, its input, options, and whether an optimizer updates during backward
CASES: dict[str, tuple[Any, Any, dict[str, Any], bool]] = {
    "activations": (gpt, words, {"memory": "2MiB", "hardware": "cpu"}, False),
    "all fits": (gpt, words, {"memory": "1GiB"}, False),
    "weights, updated in backward": (gpt, words, {"memory": "minimum"}, True),
    "weights": (gpt, words, {"memory": "minimum"}, False),
    "masks as bits": (Mlp, lambda: torch.ones(512, 128), {"memory": "minimum"}, False),
    # dropout of tanh, which is saved as well: drawn once, applied again in backward
    "ops in two parts": (
        lambda: Mlp(torch.tanh),
        lambda: torch.ones(512, 128),
        {"memory": "minimum", "hardware": "cpu", "policy": "recompute"},
        False,
    ),
    "a loss in pieces": (gpt, words, {"memory": "minimum", "split": 4}, False),
}


def trained(case: str, **more: object) -> tuple[list[Tensor], list[PlanReport]]:
    """Losses and weights of two steps, and the reports of the plans made for them."""
    build, made, options, overlap = CASES[case]
    torch._dynamo.reset()
    model, known = seeded(build), len(offcompile.reports())
    kind = AdamW if overlap else torch.optim.SGD
    beside = {"overlap": True} if overlap else {}
    optimizer = kind(model.parameters(), 1e-2, **beside)
    compiled = torch.compile(model, backend="offcompile", options=OPTIONS | options | more)
    values = []
    for step in range(2):
        torch.manual_seed(step)
        loss = compiled(made())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.detach().clone())
    values += [p.detach().clone() for p in model.parameters()]
    return values, offcompile.reports()[known:]
