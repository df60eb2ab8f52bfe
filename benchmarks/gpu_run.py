"""`make gpu`: the tests marked gpu, then `benchmarks.gpu`, in under eight minutes and offline.

Works from a bare checkout on a machine that has torch and what NEEDED names, installed or not. Each
part has its own time and is ended when that is up, so that the later ones are reached. Arguments
that are not its own go to the benchmark. Without a GPU it says what it would run.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec

from benchmarks.bare import NEEDED, ROOT, USEFUL, environment, missing

#: share of the whole that the tests may take
TESTS_SHARE = 0.4
#: a context on the card takes half a gigabyte, and a process with torch two of RAM
MOST_WORKERS = 12
#: tests for a GPU in files that need hypothesis
WITH_HYPOTHESIS = (
    "tests/graph/test_compact_kernels.py",
    "tests/kernels/test_kernels_bitmask.py",
    "tests/run/test_host_init.py",
)
#: names of tests that compare times or print rates
TIMED = "rates or bus or beside or wait or current_stream or arrives"
#: kept back for processes to end and the table to be written
SPARE_SECONDS = 15.0


def call(command: Sequence[str], env: dict[str, str], seconds: float) -> int | None:
    """The exit code; None: its time was up, and it and its children were ended."""
    print("$", shlex.join(command), flush=True)
    process = subprocess.Popen(command, env=env, cwd=ROOT, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def test_commands() -> list[list[str]]:
    """First the tests whose figures others would disturb, then the rest beside each other."""
    if find_spec("pytest") is None:
        return [[sys.executable, "-u", "tests/support/gpu_checks.py"]]
    files = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "tests" / "gpu").glob("test_*gpu*.py"))
    files.remove("tests/gpu/test_benchmark_gpu.py")
    if find_spec("hypothesis") is not None:
        files += WITH_HYPOTHESIS
    # conftest.py sets up hypothesis, which may be absent
    options = ["--noconftest", "-m", "gpu", "-rfEs", "--tb=short", "-p", "no:cacheprovider"]
    pytest = [sys.executable, "-m", "pytest", *options, "-p", "failures_at_once", *files]
    if find_spec("xdist") is None:
        return [[*pytest, "-v"]]
    beside = ["-n", str(min(MOST_WORKERS, os.cpu_count() or 1)), "--dist", "worksteal"]
    return [[*pytest, "-v", "-s", "-k", TIMED], [*pytest, *beside, "-k", f"not ({TIMED})"]]


def without_gpu() -> str | None:
    """Why nothing can run on a GPU here; None: there is one."""
    import torch

    if torch.cuda.is_available():
        print(f"{torch.cuda.get_device_name(0)}, torch {torch.__version__}", flush=True)
        return None
    built = torch.version.cuda
    if built is None:
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch {torch.__version__} for CUDA {built} finds no device"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=460.0, help="for everything")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--no-bench", action="store_true")
    asked, rest = parser.parse_known_args()
    if absent := missing(NEEDED):
        print("Cannot run:", *absent, sep="\n  ")
        return 1
    for line in missing(USEFUL):
        print(line)
    bench = [sys.executable, "-m", "benchmarks.gpu", *rest]
    if (reason := without_gpu()) is not None:
        print(f"No GPU: {reason}. On one, this would run")
        for command in test_commands():
            print("  " + shlex.join(command))
        print("  " + shlex.join(bench))
        return 0
    began, worst = time.monotonic(), 0

    def left() -> float:
        return asked.seconds - SPARE_SECONDS - (time.monotonic() - began)

    with environment() as env:
        env["PYTHONUNBUFFERED"] = "1"
        if not asked.no_tests:
            until = began + (1.0 if asked.no_bench else TESTS_SHARE) * left()
            for command in test_commands():
                code = call(command, env, max(1.0, until - time.monotonic()))
                if code is None:
                    said = "The tests were ended when their time was up; more: --no-bench"
                    print(said, flush=True)
                worst = worst or (1 if code is None else code)
        if not asked.no_bench:
            bench += ["--seconds", str(int(left()))]
            code = call(bench, env, left() + SPARE_SECONDS)
            if code is None:
                print("The benchmark was ended when its time was up", flush=True)
            worst = worst or (1 if code is None else code)
    print(f"{time.monotonic() - began:.0f} s in all", flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
