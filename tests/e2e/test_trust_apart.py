"""Tests of the trust package that need a process of their own.

The simulation puts stand-ins for threads and clocks of the whole runtime, and faults take memory,
threads and signals: what other tests have left open must not meet those, nor what these leave
meet other tests.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import warm
from trust import faults

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
@pytest.mark.parametrize("checks", ["simulation_checks.py", "fault_checks.py"])
def test_the_checks_hold_in_a_process_of_their_own(checks: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += [f"tests/trust/{checks}"]
    ran = warm.run(command, timeout=600, cwd=ROOT)
    assert ran.returncode == 0, ran.stdout[-6000:] + ran.stderr[-2000:]
    assert " passed" in ran.stdout and "failed" not in ran.stdout


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="files of Linux")
def test_faults_that_end_or_copy_a_process_come_to_what_the_matrix_says() -> None:
    cells = [c for c in faults.spread(14, seed=0) if c.fault in faults.IN_CHILDREN]
    assert {c.fault for c in cells} == set(faults.IN_CHILDREN)
    wrong = faults.played(cells)
    assert not wrong, "\n".join(f"{name}: {said}" for name, said in wrong.items())
