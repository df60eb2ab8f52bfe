"""Products of many rows with a weight on the host: by torch, from copies of its columns."""

from __future__ import annotations

import pytest
import torch

from offcompile.runtime.kernels.streaming import matmul_of_copies


@pytest.mark.parametrize("most_bytes", [1, 3000, 40_000, 1 << 20])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_it_is_the_product(turned: bool, biased: bool, most_bytes: int) -> None:
    drawn = torch.Generator().manual_seed(1)
    a = torch.randn(300, 40, generator=drawn, dtype=torch.float64)
    b = torch.randn(40, 200, generator=drawn, dtype=torch.float64)
    b = b.t().contiguous().t() if turned else b
    bias = torch.randn(200, generator=drawn, dtype=torch.float64) if biased else None
    found = matmul_of_copies(a, b, bias, most_bytes)
    torch.testing.assert_close(found, a @ b + (0 if bias is None else bias))
    assert found.is_contiguous()


def test_a_weight_without_elements() -> None:
    assert matmul_of_copies(torch.ones(3, 0), torch.ones(0, 5)).tolist() == [[0.0] * 5] * 3
