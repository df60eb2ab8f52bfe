"""Budgets are kept where it counts: by what the operating system measures, and by its limits."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CHILD = Path(__file__).parents[1] / "support" / "budget_child.py"
MIB = 1 << 20

# What a process holds beside the tensors of the step, none of which a plan can know: Python's and
# Dynamo's objects for the compiled graphs, blocks below malloc's mapping threshold that stay in
# its heaps, packed operands of matrix products, and first-touched pages of libraries. It does not
# grow with the batch.
OVERHEAD_BYTES = 24 * MIB


def run(model: str, memory: int | str, limit: int | None = None) -> dict[str, Any]:
    task = json.dumps({"model": model, "memory": memory, "limit": limit})
    done = subprocess.run(
        [sys.executable, str(CHILD), task],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@functools.cache
def unlimited(model: str) -> dict[str, Any]:
    return run(model, "plain")


@functools.cache
def budget(model: str) -> int:
    """Half of what the operating system saw the plain run take."""
    return int(unlimited(model)["peak_bytes"]) // 2


@functools.cache
def within(model: str) -> dict[str, Any]:
    """Our run at the budget, under a limit of the budget and the stated overhead."""
    return run(model, budget(model), budget(model) + OVERHEAD_BYTES)


MODELS = pytest.mark.parametrize("model", [pytest.param("mlp", marks=pytest.mark.soak), "gpt"])


@MODELS
def test_where_the_plain_run_dies_ours_trains_to_the_same_losses(model: str) -> None:
    dead = run(model, "plain", budget(model) + OVERHEAD_BYTES)
    assert dead["error"] is not None and "memory" in dead["error"].lower()
    ours = within(model)
    assert ours["error"] is None
    assert ours["losses"] == unlimited(model)["losses"]
    assert ours["counters"]["bytes_out"] > 0


@MODELS
def test_measured_peak_within_planned_peak_within_budget(model: str) -> None:
    ours = within(model)
    assert ours["planned_peak_bytes"] <= budget(model)
    assert ours["peak_bytes"] <= ours["planned_peak_bytes"] + OVERHEAD_BYTES
