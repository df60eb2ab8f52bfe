"""Training with movement on a GPU; `gpu_checks.py` says what each check holds."""

from __future__ import annotations

import gpu_checks
import pytest
import torch
from gpu_checks import CHECKS, Skipped

ON_THE_CPU = (pytest.param("bitwise-mlp", marks=pytest.mark.soak), "retain_graph")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_gpu(name: str) -> None:
    try:
        CHECKS[name]("cuda:0")
    except Skipped as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_the_checks_themselves_hold_on_the_cpu_target(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_checks, "SEARCH_SECONDS", 0.1)
    CHECKS[name]("cpu")
