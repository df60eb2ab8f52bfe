"""Runs checks and tests on the asynchronous device, each batch in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import async_device
import pytest
import warm

ROOT = Path(__file__).parents[2]
SECONDS = 280

needs_the_device = pytest.mark.skipif(
    async_device.why_not() is not None, reason=str(async_device.why_not())
)


def child(arguments: list[str], seed: int = 0) -> subprocess.CompletedProcess[str]:
    async_device.library()  # built here, so that the child's time is that of its checks
    places = [ROOT, ROOT / "tests", ROOT / "tests" / "support"]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, places)),
        "OMP_NUM_THREADS": "1",
        "ASYNC_DEVICE_SEED": str(seed),
    }
    # those of the worker that this is, which would be taken for the child's
    env = {name: value for name, value in env.items() if not name.startswith("PYTEST_")}
    return warm.run([sys.executable, *arguments], timeout=SECONDS, env=env, cwd=ROOT)


def run_checks(*names: str) -> None:
    """Run checks of `async_checks.CHECKS`, and fail with what each that failed says."""
    done = child([str(ROOT / "tests" / "support" / "async_child.py"), *names])
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    told = {name: said for name, said, _ in map(json.loads, lines)}
    wrong = [f"{name}: {said}" for name, said in told.items() if said is not None]
    assert not wrong, "\n".join(wrong)
    assert list(told) == list(names), f"exit {done.returncode}\n{done.stderr[-4000:]}"


def run_gpu_tests(files: Sequence[str], chosen: str, seed: int) -> int:
    """Run tests of tests/gpu that `chosen` (as for -k) names; returns how many passed."""
    paths = [str(ROOT / "tests" / "gpu" / file) for file in files]
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    asked = ["-m", "pytest", *quiet, "-p", "async_device.as_card", *paths, "-k", chosen]
    done = child(asked, seed)
    said = done.stdout.strip().splitlines()
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return int(said[-1].split(" passed")[0].split()[-1])
