"""Two processes that train one model together: each its share of a batch, or of the weights."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .rows import Row

WORLD = 2
#: below it nothing fits, half of what moves fits, and all of it
CASES = {"DDP": ("minimum", "9MiB", "1GiB"), "FSDP2": ("minimum", "9MiB", "1GiB")}
LONGEST_S = 900
_TESTS = Path(__file__).resolve().parents[1]


def rows(scale: float, seed: int) -> list[Row]:
    """One row, of all cases whatever the scale: nothing here is drawn."""
    ranks = run(CASES)
    cases = [case for rank in ranks for case in rank]
    broken = [f"{c['case']}: other bits than the plain run" for c in cases if not c["equal"]]
    if broken:
        raise AssertionError("\n".join([f"{len(broken)} cases are broken:", *broken]))
    figures = (
        ("with another graph than the plain one", f"{sum(c['changed'] > 0 for c in cases)}"),
        ("moves planned", f"{sum(c['moves'] for c in cases):,}"),
        ("bytes sent out", f"{sum(c['bytes_out'] for c in cases):,}"),
    )
    of = WORLD * sum(map(len, CASES.values()))
    return [Row("DDP and FSDP2 over two processes, on each", len(cases), of, (), figures)]


def run(cases: Mapping[str, Sequence[str]]) -> list[list[dict[str, Any]]]:
    """Return each rank's findings for each case."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "trust.ranks_child"]
        told = [str(Path(folder) / "store"), json.dumps(cases)]
        ranks = [
            subprocess.Popen(
                [*command, str(rank), *told],
                cwd=_TESTS,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]
        try:
            ended = [rank.communicate(timeout=LONGEST_S) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for rank, (_, said) in zip(ranks, ended, strict=True):
        assert rank.returncode == 0, said[-4000:]
    return [[json.loads(line) for line in out.splitlines()] for out, _ in ended]
