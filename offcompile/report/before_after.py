"""Compares a step that was split along its tokens with the same step as a whole."""

from __future__ import annotations

from collections.abc import Iterator

from offcompile.ir import Problem
from offcompile.ir.units import show_us, size
from offcompile.planning.splitting import Splitting

#: number of tensors named as the largest
LARGEST = 3

Row = tuple[str, str, str]  # what, whole, in pieces


def before_after(made: Splitting, problem: Problem) -> Iterator[Row]:
    """Yields the figures that a split changes. `problem`: the step that was planned.

    Floors and times come from estimates of both, as the whole step may never have been measured.
    """
    whole, split = made.whole, made.split
    yield "floor", size(whole.floor_bytes), size(split.floor_bytes)
    times = show_us(whole.compute_us), f"{show_us(split.compute_us)} ({made.slower:+.1%})"
    yield "time of the ops, estimated", *times
    yield "ops", f"{len(whole.problem.ops):,}", f"{len(problem.ops):,}"
    steps = (whole.problem, problem)
    before, after = (size(sum(t.nbytes for t in step.tensors)) for step in steps)
    yield "all tensors", before, after
    ranked = [_largest(step) for step in steps]
    for before, after in zip(*ranked, strict=False):
        yield "one of the largest", before, after


def _largest(problem: Problem) -> list[str]:
    made = [t for t in problem.tensors if t.kind == "activation"]
    made.sort(key=lambda t: (-t.nbytes, t.id))
    return [f"{t.id}, {size(t.nbytes)}" for t in made[:LARGEST]]


def split_text(made: Splitting, problem: Problem) -> str:
    rows = [("", "whole", "in pieces"), *before_after(made, problem)]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = ("  ".join(f"{v:{w}}" for v, w in zip(row, widths, strict=True)) for row in rows)
    parts = (f"  {part.words()}" for part in made.parts)
    return "\n".join(("split along tokens", *parts, *(f"  {row}".rstrip() for row in table)))
