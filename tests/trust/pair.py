"""Starts processes that form a gloo group, two by default, and reads the findings of each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import warm

WORLD = 2
_TESTS = Path(__file__).resolve().parents[1]


def run_pair(
    command: Sequence[str],
    asked: object,
    longest_s: float,
    beside: Mapping[str, str] | None = None,
    world: int = WORLD,
    may_fail: Collection[int] = (),
) -> list[list[dict[str, Any]]]:
    """Run a command in tests/ for each rank, with its number, the group's file and what is asked;
    returns the JSON lines that each printed. beside: more of its environment. may_fail: ranks that
    may end otherwise than in order."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | dict(beside or {})
    with tempfile.TemporaryDirectory() as folder:
        told = [str(Path(folder) / "store"), json.dumps(asked)]
        ranks = [
            warm.start([*command, str(rank), *told], cwd=_TESTS, env=environment)
            for rank in range(world)
        ]
        try:
            ended = [rank.communicate(timeout=longest_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, said)) in enumerate(zip(ranks, ended, strict=True)):
        assert rank.returncode == 0 or number in may_fail, said[-4000:]
    return [[json.loads(line) for line in out.splitlines()] for out, _ in ended]
