"""Two processes that train one model together: each its share of a batch, or of the weights."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .pair import WORLD, run_pair
from .rows import Row

#: below it nothing fits, half of what moves fits, and all of it
CASES = {"DDP": ("minimum", "9MiB", "1GiB"), "FSDP2": ("minimum", "9MiB", "1GiB")}
LONGEST_S = 900


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
    return run_pair([sys.executable, "-m", "trust.ranks_child"], cases, LONGEST_S)
