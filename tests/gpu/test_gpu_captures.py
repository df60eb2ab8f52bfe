"""Steps captured as CUDA graphs on a GPU; `capture_checks.py` and `capture_weights.py` say
what each check holds."""

from __future__ import annotations

import capture_checks
import pytest
import torch
from capture_weights import CHECKS as OF_WEIGHTS
from gpu_checks import Skipped

from offcompile.run.replay import step_graph

CHECKS = capture_checks.CHECKS | OF_WEIGHTS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("name", CHECKS)
def test_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # costs that are not measured: no step is judged, so that plans settle at once
    monkeypatch.setattr(capture_checks, "MORE", {"hardware": "h100-sxm"})
    # libraries take more memory for the stream of captures than these models have
    monkeypatch.setattr(step_graph, "check_room", lambda *asked: None)
    try:
        CHECKS[name]("cuda:0")
    except Skipped as reason:
        pytest.skip(str(reason))
