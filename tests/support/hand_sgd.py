"""Plain SGD by hand, which shows every gradient as exact text."""

from __future__ import annotations

from collections.abc import Iterable

import torch


@torch.no_grad()
def step_by_hand(parameters: Iterable[torch.nn.Parameter]) -> list[str]:
    """Update by the gradients there are and drop them; returns the sum of each."""
    seen = []
    for p in parameters:
        if p.grad is not None:
            seen.append(float(p.grad.double().sum()).hex())
            p.sub_(p.grad, alpha=0.1)
            p.grad = None
    return seen
