"""Models of others at sizes at which budgets count: peaks by the operating system."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .peaks_child import CASES
from .rows import Row

MIB = 1 << 20
#: bytes that a process holds beside the tensors of the step; see test_budget_real.py
OVERHEAD_BYTES = 24 * MIB
LONGEST_S = 900
_TESTS = Path(__file__).resolve().parents[1]


def rows(scale: float, seed: int) -> list[Row]:
    """Nothing here is drawn: `seed` says where a short run starts."""
    names = list(CASES)
    wanted = max(1, min(len(names), round(scale * len(names))))
    chosen = [names[(int(n * len(names) / wanted) + seed) % len(names)] for n in range(wanted)]
    return [row_of({name: run(name) for name in chosen})]


def run(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "trust.peaks_child", name]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=_TESTS, env=environment, capture_output=True, text=True, timeout=LONGEST_S
    )
    assert done.returncode == 0, f"{name}: {done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


def row_of(found: Mapping[str, Mapping[str, Any]]) -> Row:
    """A run counts if its losses are the plain ones and steps kept within the budget."""
    missed = {name: why for name, one in found.items() if (why := wrong(one))}
    if missed:
        broken = (f"{name}: {why}" for name, why in missed.items())
        raise AssertionError("\n".join([f"{len(missed)} peaks are broken:", *broken]))
    beyond = [one["peak_bytes"] - one["budget_bytes"] for one in found.values()]
    firsts = [one["first_bytes"] - one["budget_bytes"] for one in found.values()]
    shares = [one["budget_bytes"] / one["plain_bytes"] for one in found.values()]
    figures = (
        ("budgets of the plain peak", _between(f"{share:.0%}" for share in sorted(shares))),
        ("beyond the budget in a step", _between(map(_mib, sorted(beyond)))),
        ("in the first call, which measures and plans", _between(map(_mib, sorted(firsts)))),
        ("bytes sent out", f"{sum(one['bytes_out'] for one in found.values()):,}"),
    )
    what = f"peaks of a process, within the budget and {OVERHEAD_BYTES // MIB} MiB"
    return Row(what, len(found), len(found), (), figures)


def wrong(one: Mapping[str, Any]) -> str:
    if not one["equal"]:
        return "losses are not those of the plain run"
    if one["peak_bytes"] > one["budget_bytes"] + OVERHEAD_BYTES:
        return f"{_mib(one['peak_bytes'] - one['budget_bytes'])} beyond the budget"
    if one["plain_bytes"] <= one["budget_bytes"] + OVERHEAD_BYTES:
        return "the plain run keeps within that, too"
    return ""


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:+.1f} MiB"


def _between(values: Iterable[str]) -> str:
    first, *others = values
    return f"{first} to {others[-1]}" if others else first
