"""Mixed types on a device: one kernel instead of casts and torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offcompile import optim
from offcompile.optim import apply


def trained(steps: int, **more: Any) -> tuple[nn.Parameter, Any]:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(40, 30).to(torch.bfloat16))
    optimizer = optim.AdamW([p], lr=1e-2, states="device", **more)
    for _ in range(steps):
        p.grad = torch.randn(40, 30).to(torch.bfloat16)
        optimizer.step()
    return p, optimizer


@pytest.mark.parametrize("more", [{}, {"maximize": True}, {"max_norm": 0.5}])
def test_the_kernel_gives_what_torch_gives(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, by_torch = trained(5, **more)
    monkeypatch.setattr(apply, "by_kernel", lambda parameter: True)
    found, by_kernel = trained(5, **more)
    for name in ("master", "exp_avg", "exp_avg_sq", "step"):
        mine, theirs = by_kernel.state[found][name], by_torch.state[wanted][name]
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0.0)
    assert torch.equal(found, by_kernel.state[found]["master"].to(torch.bfloat16))


def test_what_the_kernel_cannot_do_goes_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = trained(3, amsgrad=True)
    monkeypatch.setattr(apply, "by_kernel", lambda parameter: True)
    found, _ = trained(3, amsgrad=True)
    assert torch.equal(found, wanted)


def test_steps_are_counted_without_asking_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply, "by_kernel", lambda parameter: True)
    p, optimizer = trained(2)
    entry = optimizer._core.entries[p]
    assert entry.counted == (2, entry.step._version)
    optimizer.state[p]["step"] += 10  # somebody else counts
    assert entry.count() == 12
