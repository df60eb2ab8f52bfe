"""A kernel of Inductor is one op of the problem, with all that it holds meanwhile."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import offcompile

ROWS, WIDTH = 64, 128
PART_BYTES = ROWS * WIDTH * 4


class Stacked(nn.Module):
    """Products that are stacked, and laid out anew for the next product."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        several = torch.stack([part(x) for part in self.parts])
        return self.out(several.permute(1, 0, 2).reshape(ROWS, 3 * WIDTH))


def test_what_writes_parts_side_by_side_may_share_its_kernel_with_what_comes_after() -> None:
    """So parts, what they become, and its new layout are there at once."""
    with torch.no_grad():
        report = offcompile.plan(
            Stacked().requires_grad_(False),
            torch.randn(ROWS, WIDTH),
            memory="minimum",
            options={"lowering": "inductor"},
        )
    (op,) = (op for op in report.problem.ops if len(op.reads) == 3)
    held = sum(report.problem.tensor[t].nbytes for t in (*op.reads, *op.writes))
    assert held + op.workspace_bytes == (3 + 3 + 3) * PART_BYTES
