"""Attention runs again where it draws no random numbers, and gives the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import offcompile

WIDTH, ROWS, HEADS = 64, 96, 4


class Attending(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).view(2, ROWS, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout, is_causal=True
        )
        return x + self.out(seen.transpose(1, 2).reshape(x.shape))


def trained(dropout: float, **how: object) -> list[torch.Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(Attending(dropout) for _ in range(2)))
    run = torch.compile(model, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        loss = run(torch.randn(2, ROWS, WIDTH)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_attention_runs_again_only_where_it_drops_nothing(dropout: float) -> None:
    options = {"memory": "minimum", "policy": "recompute:variant=all", "lowering": "aot_eager"}
    options |= {"hardware": "cpu", "seconds": 0.1}
    plain = trained(dropout, backend="aot_eager")
    ours = trained(dropout, backend="offcompile", options=options)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    again = {r.op for r in offcompile.reports()[-1].plan.recomputes}
    assert any("attention" in op for op in again) == (dropout == 0.0)
