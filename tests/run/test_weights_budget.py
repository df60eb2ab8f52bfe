"""A model whose weights and gradients exceed the budget trains, by what the system measures."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import warm

CHILD = Path(__file__).parents[1] / "support" / "weights_child.py"
MIB = 1 << 20

#: weights of the model, and as much again of gradients
WEIGHTS_BYTES = 96 * MIB
#: bytes that a process holds beside the tensors of the step (see test_budget_real)
OVERHEAD_BYTES = 48 * MIB
#: built as any model is, its weights must fit once, before the first step takes them to the host
BUILT = 100 * MIB
#: born on the host, they need not fit at all
BORN = 14 * MIB


@functools.cache
def run(memory: int | str, limit: int | None = None, born: bool = False) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as spill:
        task = {"memory": memory, "limit": limit, "born": born, "spill": spill}
        done = warm.run([sys.executable, str(CHILD), json.dumps(task)])
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def ours(budget: int) -> dict[str, Any]:
    return run(budget, budget + OVERHEAD_BYTES, budget == BORN)


BUDGETS = pytest.mark.parametrize(
    "budget",
    [
        pytest.param(BUILT, id="built", marks=pytest.mark.soak),
        pytest.param(BORN, id="born", marks=pytest.mark.long),
    ],
)


def test_the_budgets_are_below_what_the_plain_run_needs() -> None:
    plain = run("plain")
    assert plain["weights_bytes"] == WEIGHTS_BYTES
    assert plain["peak_bytes"] >= 2 * WEIGHTS_BYTES
    assert BUILT + OVERHEAD_BYTES < 2 * WEIGHTS_BYTES and BORN + OVERHEAD_BYTES < WEIGHTS_BYTES


@BUDGETS
def test_where_the_plain_run_dies_ours_trains_to_the_same_weights(budget: int) -> None:
    dead = run("plain", BUILT + OVERHEAD_BYTES)  # the larger of the two limits
    assert dead["error"] is not None and "memory" in dead["error"].lower()
    found, plain = ours(budget), run("plain")
    assert found["error"] is None
    assert found["losses"] == plain["losses"] and found["sum"] == plain["sum"]
    assert len(set(plain["losses"])) == len(plain["losses"]) == 3


@BUDGETS
def test_private_memory_stays_within_the_budget_and_the_overhead(budget: int) -> None:
    found = ours(budget)
    assert found["planned_peak_bytes"] <= budget
    assert found["peak_bytes"] <= budget + OVERHEAD_BYTES


@BUDGETS
def test_weights_and_gradients_are_pages_of_files_that_the_system_may_drop(budget: int) -> None:
    held = ours(budget)["held"]
    assert held["host_bytes"] >= 2 * WEIGHTS_BYTES - budget
    assert held["private_bytes"] == 0
    assert held["dropped_bytes"] > WEIGHTS_BYTES / 4
    assert held["same_after"]
