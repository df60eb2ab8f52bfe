"""Starts two processes that form a gloo group, and reads what each found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rank_cells import Cell

WORLD, LONGEST_S = 2, 1800
_HERE = Path(__file__).resolve().parent


def run(cells: Sequence[Cell]) -> list[list[dict[str, Any]]]:
    """Train the cells on both ranks; returns each rank's findings, one a cell."""
    return start("rank_child.py", [asdict(cell) for cell in cells])


def start(child: str, asked: object) -> list[list[dict[str, Any]]]:
    """Run a script of this folder on two ranks; returns the JSON lines that each printed."""
    paths = [str(_HERE), str(_HERE.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with tempfile.TemporaryDirectory() as folder:
        told = [str(Path(folder) / "store"), json.dumps(asked)]
        ranks = [
            subprocess.Popen(
                [sys.executable, str(_HERE / child), str(rank), *told],
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
