"""Steps captured as CUDA graphs on a GPU; `capture_checks.py` says what each check holds."""

from __future__ import annotations

import capture_checks
import pytest
import torch
from capture_checks import CHECKS

from offcompile.run.replay.step_graph import StepGraph


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # costs that are not measured: no step is judged, so that plans settle at once
    monkeypatch.setattr(capture_checks, "MORE", {"hardware": "h100-sxm"})
    # libraries take more memory for the stream of captures than these models have
    monkeypatch.setattr(StepGraph, "_check_budget", lambda self, *halves: None)
    CHECKS[name]("cuda:0")
