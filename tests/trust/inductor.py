"""Some of the programs of others (tests/wild) with Inductor's kernels, near the plain run."""

from __future__ import annotations

from collections.abc import Sequence

from wild.families import load
from wild.judge import BROKEN, NEAR, Verdict

from .rows import Row
from .wild import judged

NAMES = (
    "loops/allocates_gradients_itself",
    "loops/evaluates_between_steps",
    "representations/calls_triplets",
    "parameters/freezes_and_unfreezes",
    "parameters/converts_after_compiling",
    "parameters/converts_in_place_of_swapping",
    "parameters/updates_in_backward",
    "compiling/breaks_its_graph",
    "compiling/returns_structures",
    "transformers/classifies_sequences",
    "timm/test_vit2",
)


def rows(scale: float, seed: int) -> list[Row]:
    """Nothing here is drawn: `seed` says where a short run starts."""
    wanted = max(1, min(len(NAMES), round(scale * len(NAMES))))
    chosen = [NAMES[(int(n * len(NAMES) / wanted) + seed) % len(NAMES)] for n in range(wanted)]
    programs = load()
    return [row_of(judged([programs[name] for name in chosen], "--inductor"))]


def row_of(verdicts: Sequence[Verdict]) -> Row:
    broken = [f"{v.program}: {v.why}" for v in verdicts if v.kind == BROKEN]
    if broken:
        raise AssertionError("\n".join([f"{len(broken)} programs are broken:", *broken]))
    others = tuple(f"{v.program}: {v.kind} ({v.why})" for v in verdicts if v.kind != NEAR)
    figures = (
        ("moves planned", f"{sum(v.moves for v in verdicts):,}"),
        ("bytes sent out", f"{sum(v.bytes_out for v in verdicts):,}"),
    )
    what = "programs of others under Inductor, near the plain run at the minimum"
    return Row(what, len(verdicts) - len(others), len(verdicts), others, figures)
