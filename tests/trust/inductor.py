"""Programs of others (tests/wild) with Inductor's kernels, near the plain run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from wild.families import load
from wild.judge import BROKEN, NEAR, REFUSED, Verdict
from wild.program import Program

from .rows import Row
from .wild import judged

#: two compilations of each program take a minute together
FAMILIES = (
    "loops",
    "compiling",
    "parameters",
    "representations",
    "generative",
    "decisions",
    "sequences",
    "peft",
    "transformers",
    "trainer",
    "accelerate",
    "lightning",
    "diffusers",
    "trl",
    "torchao",
    "timm",  # two minutes for each of its models
)
#: plain Inductor reads a tensor of zeros that has no memory, and may end the process
LEFT_OUT = "decisions/solves_an_equation_with_func"


def chosen() -> list[Program]:
    return [p for n, p in load().items() if p.family in FAMILIES and n != LEFT_OUT]


def rows(scale: float, seed: int) -> list[Row]:
    """Nothing here is drawn: `seed` says where a short run starts."""
    programs = chosen()
    wanted = max(1, min(len(programs), round(scale * len(programs))))
    step = len(programs) / wanted
    families: dict[str, list[Program]] = {}
    for n in range(wanted):
        program = programs[int(n * step + seed) % len(programs)]
        families.setdefault(program.family, []).append(program)
    return [row_of([v for of in families.values() for v in judged(of, "--inductor")])]


def row_of(verdicts: Sequence[Verdict]) -> Row:
    broken = [f"{v.program}: {v.why}" for v in verdicts if v.kind == BROKEN]
    if broken:
        raise AssertionError("\n".join([f"{len(broken)} programs are broken:", *broken]))
    kinds = Counter(v.kind for v in verdicts)
    others = tuple(
        f"{v.program}: {v.kind} ({v.why})" for v in verdicts if v.kind not in (NEAR, REFUSED)
    )
    figures = (
        (NEAR, str(kinds[NEAR])),
        (REFUSED, str(kinds[REFUSED])),
        ("moves planned", f"{sum(v.moves for v in verdicts):,}"),
        ("bytes sent out", f"{sum(v.bytes_out for v in verdicts):,}"),
    )
    what = "programs of others under Inductor, near the plain run at the minimum"
    return Row(what, len(verdicts) - len(others), len(verdicts), others, figures)
