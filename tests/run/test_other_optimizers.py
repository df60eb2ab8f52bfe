"""Reports say what other optimizers hold beside a budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import offcompile
from offcompile import optim

WIDTH, BATCH = 256, 512


def _said(optimizer: type[torch.optim.Optimizer], memory: int) -> list[str]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    options = {"memory": memory, "lowering": "aot_eager", "seconds": 0.3}
    run = torch.compile(model, backend="offcompile", options=options)
    made = optimizer(model.parameters(), lr=1e-3)  # type: ignore[call-arg]
    for _ in range(3):
        run(torch.ones(BATCH, WIDTH)).mean().backward()
        made.step()
        made.zero_grad()
    profile = offcompile.reports()[-1].profile
    assert profile is not None
    return [line for line in profile.said if "of states" in line]


def test_states_beyond_the_budget_are_said_once_with_what_to_do() -> None:
    (said,) = _said(torch.optim.AdamW, 6 << 20)
    states_bytes = 2 * 4 * 4 * WIDTH * (WIDTH + 1)
    assert f"AdamW holds {states_bytes + 8 * 4:,} bytes" in said
    assert "Set memory lower by so much, or use offcompile.optim" in said


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_states_that_fit_or_are_not_there_are_not_worth_a_word(
    optimizer: type[torch.optim.Optimizer],
) -> None:
    assert not _said(optimizer, 64 << 20 if optimizer is torch.optim.AdamW else 6 << 20)


def test_our_optimizers_are_in_the_budget() -> None:
    assert not _said(optim.AdamW, 6 << 20)
