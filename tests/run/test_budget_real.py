"""Budgets are kept where it counts: by what the operating system measures, and by its limits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

CHILD = Path(__file__).parents[1] / "support" / "budget_child.py"
MIB = 1 << 20

# A process holds more than the tensors of the step, and no plan can know it: Python's and Dynamo's
# objects for the compiled graphs, blocks below malloc's mapping threshold that stay in its heaps,
# packed operands of matrix products, and pages of libraries touched for the first time. It does
# not grow with the batch.
OVERHEAD_BYTES = 24 * MIB


def run(model: str, memory: int | str, limit: int | None = None) -> dict[str, Any]:
    task = json.dumps({"model": model, "memory": memory, "limit": limit})
    done = warm.run([sys.executable, str(CHILD), task])
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


MODELS = pytest.mark.parametrize("model", [pytest.param("mlp", marks=pytest.mark.soak), "gpt"])


@MODELS
def test_ours_trains_within_half_of_the_memory_where_the_plain_run_dies(model: str) -> None:
    """One test, since processes that share tests out would each make the runs again."""
    unlimited = run(model, "plain")
    # half of what the operating system saw the plain run take
    budget = int(unlimited["peak_bytes"]) // 2
    limit = budget + OVERHEAD_BYTES

    dead = run(model, "plain", limit)
    assert dead["error"] is not None and "memory" in dead["error"].lower()

    ours = run(model, budget, limit)
    assert ours["error"] is None
    assert ours["losses"] == unlimited["losses"]
    assert ours["counters"]["bytes_out"] > 0
    assert ours["planned_peak_bytes"] <= budget
    assert ours["peak_bytes"] <= ours["planned_peak_bytes"] + OVERHEAD_BYTES
