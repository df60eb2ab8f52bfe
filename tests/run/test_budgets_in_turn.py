"""One budget after the other in one process, as in a notebook: each as if it were the first."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import offcompile
from offcompile.run.accounts.process import process

TOKENS, WIDTH = 512, 256
#: nothing moves under the third
BUDGETS = ("28MiB", "24MiB", "1GiB", "minimum", "24MiB")


def build() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        (nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4)
    )
    return nn.Sequential(*(part for layer in layers for part in layer))


@pytest.mark.long
def test_the_memory_of_the_former_model_is_let_go() -> None:
    x = torch.randn(TOKENS, WIDTH)
    usage = process.usage_of(torch.device("cpu"))
    losses, moved, budgets = set(), [], []
    for memory in BUDGETS:
        torch._dynamo.reset()
        model = build()  # the one before is dropped here, as by a cell that runs again
        options = {"memory": memory, "lowering": "aot_eager", "hardware": "cpu", "seconds": 0.05}
        run = torch.compile(model, backend="offcompile", options=options)
        known = len(offcompile.reports())
        for _ in range(2):
            loss = run(x).square().mean()
            loss.backward()
            model.zero_grad()
        report = offcompile.reports()[-1]
        assert len(offcompile.reports()) > known, "planned anew"
        losses.add(loss.item())
        moved.append(not report.fits)
        budgets.append(report.budget_bytes)
        del loss
        gc.collect()
        *former, entry = usage.entries()
        assert not any(one.bound() or one.waiting() for one in former)
        assert len(usage.holdings.living()) == len(list(model.parameters()))
        assert usage.held_beside(entry, entry.bound()[0]).now == 0
        held = offcompile.counters()
        assert held["live_tickets"] == held["spill_bytes"] == held["keeper_bytes"] == 0
    assert len(losses) == 1
    assert moved == [True, True, False, True, True]
    assert budgets[1] == budgets[4] and budgets[:3] == [28 << 20, 24 << 20, 1 << 30]
