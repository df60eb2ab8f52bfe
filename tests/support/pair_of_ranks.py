"""Starts processes that form a gloo group, two by default, and reads what each found."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rank_cells import Cell
from trust.pair import WORLD, run_pair

#: the whole matrix on a busy machine
LONGEST_S = 3600
_HERE = Path(__file__).resolve().parent


def run(cells: Sequence[Cell], world: int = WORLD) -> list[list[dict[str, Any]]]:
    """Train the cells on all ranks; returns each rank's findings, one a cell."""
    return start("rank_child.py", [world, [asdict(cell) for cell in cells]], world)


def start(
    child: str, asked: object, world: int = WORLD, may_fail: Collection[int] = ()
) -> list[list[dict[str, Any]]]:
    """Run a script of this folder on each rank; returns the JSON lines that each printed."""
    paths = [str(_HERE), str(_HERE.parent), os.environ.get("PYTHONPATH", "")]
    beside = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return run_pair([sys.executable, str(_HERE / child)], asked, LONGEST_S, beside, world, may_fail)
