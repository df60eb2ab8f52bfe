"""How often an op runs to be timed on a card: by its own length. The card's clock is made up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offcompile.runtime.measure import op_cuda
from offcompile.runtime.measure.op_cuda import cuda_time_us


@pytest.mark.parametrize(
    ("took_us", "runs"), [(10.0, 3 + 20), (4_000.0, 3 + 5), (15_000.0, 3 + 3), (300_000.0, 2)]
)
def test_long_ops_run_twice_and_short_ones_often(
    took_us: float, runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []

    def timed(run: Callable[[], object], device: torch.device, count: int) -> list[float]:
        for _ in range(count):
            run()
        return [took_us] * count

    monkeypatch.setattr(op_cuda, "_runs_us", timed)
    assert cuda_time_us(lambda: ran.append(1), torch.device("cuda:0"), 0.02) == took_us
    assert len(ran) == runs
