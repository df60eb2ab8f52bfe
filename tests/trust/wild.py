"""Programs of other people's kinds (tests/wild): a process for each family, as packages mix ill."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import warm
from wild.families import load
from wild.judge import BROKEN, EQUAL, LIMIT, MISSING, PLAIN_FAILS, REFUSED, Verdict
from wild.program import Program

from .rows import Row

#: a family of 90 models, each compiled two or three times, by Inductor too, on a busy machine
LONGEST_S = 8 * 3600
_TESTS = Path(__file__).resolve().parents[1]


def rows(scale: float, seed: int) -> list[Row]:
    """A row for each family. Nothing here is drawn: `seed` says where a short run starts."""
    programs = list(load().values())
    wanted = max(1, min(len(programs), round(scale * len(programs))))
    step = len(programs) / wanted
    chosen = [programs[int(n * step + seed) % len(programs)] for n in range(wanted)]
    families: dict[str, list[Program]] = {}
    for program in chosen:
        families.setdefault(program.family, []).append(program)
    found = [row_of(name, judged(of)) for name, of in families.items()]
    broken = [f"{v.program}: {v.why}" for _, verdicts in found for v in verdicts if not v.holds]
    if broken:
        raise AssertionError("\n".join([f"{len(broken)} programs are broken:", *broken]))
    return [row for row, _ in found]


def judged(programs: Iterable[Program], *how: str) -> list[Verdict]:
    """Judge these in a process of their own; `how`: further arguments of `python -m wild`."""
    names = [str(p) for p in programs]
    command = [sys.executable, "-m", "wild", "--json", "--exactly", *how, *names]
    ran = warm.run(command, timeout=LONGEST_S, cwd=_TESTS)
    verdicts = [
        Verdict(**json.loads(line)) for line in ran.stdout.splitlines() if line.startswith("{")
    ]
    judged = {v.program for v in verdicts}
    died = f"its process ended with {ran.returncode} before it was judged"
    return [*verdicts, *(Verdict(n, BROKEN, died) for n in names if n not in judged)]


def row_of(family: str, verdicts: list[Verdict]) -> tuple[Row, list[Verdict]]:
    """Programs that are equal or refused as is right count as held; the others are named."""
    kinds = Counter(v.kind for v in verdicts)
    others = tuple(
        f"{v.program}: {v.kind} ({v.why})"
        for v in verdicts
        if v.kind in (PLAIN_FAILS, LIMIT, MISSING)
    )
    figures = (
        (EQUAL, str(kinds[EQUAL])),
        (REFUSED, str(kinds[REFUSED])),
        ("moves planned", f"{sum(v.moves for v in verdicts):,}"),
        ("bytes sent out", f"{sum(v.bytes_out for v in verdicts):,}"),
    )
    held = kinds[EQUAL] + kinds[REFUSED]
    return Row(f"programs of others, {family}", held, len(verdicts), others, figures), verdicts
