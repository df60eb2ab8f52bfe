"""Dropout taken apart: the same numbers, and a part that may run again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import offcompile
from offcompile.graph.dropout import aten

DEPTH, WIDTH, ROWS, BUDGET = 4, 64, 2048, 21 << 18


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("share", [0.1, 0.37, 0.5, 0.9])
def test_the_parts_draw_and_give_what_the_whole_does(share: float, dtype: torch.dtype) -> None:
    x = torch.randn(37, 53).to(dtype)
    torch.manual_seed(3)
    whole, mask = aten.native_dropout(x, share, True)
    after = torch.rand(3)
    torch.manual_seed(3)
    keep = aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1.0 - share)
    scale = float(torch.tensor(1.0 / (1.0 - share), dtype=dtype))
    parts = aten.native_dropout_backward(x, keep, scale)
    assert torch.equal(mask, keep) and torch.equal(whole, parts)
    assert torch.equal(after, torch.rand(3))


class Dropping(nn.Module):
    """Layers whose results are cheap to make again from what went into them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(nn.functional.dropout(torch.tanh(x), 0.2, self.training))
        return x.square().mean()


def losses_and_gradients(memory: int | None) -> list[Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Dropping()
    options = {"memory": memory, "lowering": "aot_eager", "policy": "recompute"}
    options |= {"hardware": "cpu", "seconds": 0.1}
    compiled = (
        torch.compile(model, backend="aot_eager")
        if memory is None
        else torch.compile(model, backend="offcompile", options=options)
    )
    found = []
    for step in range(3):
        torch.manual_seed(step)
        loss = compiled(torch.randn(ROWS, WIDTH))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
        model.zero_grad()
    return found


def test_dropout_runs_again_bit_for_bit() -> None:
    expected = losses_and_gradients(None)
    found = losses_and_gradients(BUDGET)
    (report,) = offcompile.reports()[-1:]
    again = {one.op for one in report.plan.recomputes}
    assert again & {op.id for op in report.problem.ops if "getitem" in op.id}
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
