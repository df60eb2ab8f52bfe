"""Kernels against torch, in Triton's interpreter: one process runs all cases, each is a test."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import warm
from kernel_cases import CASES

from offcompile.runtime.kernels import has_triton

pytestmark = pytest.mark.skipif(
    not has_triton(), reason="Triton is not installed: pip install triton"
)
HERE = Path(__file__).parents[1] / "support"
ONLY_INTERPRETED = (
    "beyond-31-bits-copied",
    "beyond-31-bits-gathered",
    "bad-indices-stop",
    "bad-indices-read-nothing",
    "plain-names-run-kernels",
    "each-weight-is-read-once",
    "each-gradient-is-written-once",
    "products-run-kernels",
)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    environment = {
        **os.environ,
        # it must be known before a kernel is read, and must not reach the tests that compile
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton")),
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(HERE / "interpreter_child.py")]
    done = warm.run(command, env=environment, imported=warm.LITTLE)
    found: dict[str, str | None] = dict(json.loads(line) for line in done.stdout.splitlines())
    if done.returncode:
        last = next(reversed(found), "none")
        pytest.fail(f"the interpreter ended after case {last}:\n{done.stderr[-4000:]}")
    return found


@pytest.mark.parametrize("name", [*CASES, *ONLY_INTERPRETED])
def test_a_kernel_does_what_torch_does(name: str, outcomes: dict[str, str | None]) -> None:
    if wrong := outcomes[name]:
        pytest.fail(wrong, pytrace=False)


def test_no_case_is_left_out(outcomes: dict[str, str | None]) -> None:
    assert set(outcomes) == {*CASES, *ONLY_INTERPRETED}
