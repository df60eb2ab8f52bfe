"""Runs HiGHS, and derives proven bounds from its answers."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from offcompile.bounds.highs import Constraints, Floats, Outcome, solve

from .matrix import LinearProgram
from .model import BoundModel


@dataclass(frozen=True)
class Answer:
    """`ns`: the proven bound, or None. `away`: by gap, in the best solution seen."""

    ns: float | None
    away: Mapping[tuple[str, str | None], float]
    finished: bool
    infeasible: bool
    seconds: float


def solve_lp(model: BoundModel, op_ids: tuple[str, ...], seconds: float) -> Answer:
    """Solves the LP. Its bound is recomputed from the duals, whatever the tolerances."""
    began, p = time.thread_time(), model.program
    try:
        rows = Constraints(p.matrix, p.rhs)
        found = solve(p.cost, rows, least=p.lo, most=p.hi, time_limit=max(0.05, seconds))
    except (ValueError, RuntimeError, MemoryError):
        return Answer(None, {}, False, False, time.thread_time() - began)
    spent = time.thread_time() - began
    if found.x is None or found.row_duals is None:
        infeasible = found.outcome is Outcome.INFEASIBLE
        return Answer(None, {}, infeasible, infeasible, spent)
    bound = dual_bound(p, found.row_duals)
    ns = min(bound * model.unit_ns, model.most_ns)
    return Answer(ns, _away(model, found.x, op_ids), True, False, spent)


def dual_bound(p: LinearProgram, multipliers: Floats) -> float:
    """A bound that any multipliers prove, since every column is bounded (weak duality).

    min c·x ≥ y·b + Σ min over lo ≤ x ≤ hi of (c − Aᵀy)·x, for every y ≤ 0.
    """
    y = np.minimum(multipliers, 0.0)
    reduced = p.cost - p.matrix.transposed_times(y)
    return float(y @ p.rhs + np.minimum(reduced * p.lo, reduced * p.hi).sum())


def solve_milp(model: BoundModel, op_ids: tuple[str, ...], seconds: float) -> Answer:
    """Solves the MILP: whole tensors stay or leave. The dual bound holds even after a timeout."""
    began, p = time.thread_time(), model.program
    try:
        with _stdout_kept_clean():
            found = solve(
                p.cost,
                Constraints(p.matrix, p.rhs),
                least=p.lo,
                most=p.hi,
                whole=p.integral,
                time_limit=max(0.05, 0.9 * seconds),
                mip_rel_gap=1e-5,
            )
    except (ValueError, RuntimeError, MemoryError):
        return Answer(None, {}, False, False, time.thread_time() - began)
    spent = time.thread_time() - began
    bound, infeasible = found.bound, found.outcome is Outcome.INFEASIBLE
    is_proven = bound is not None and np.isfinite(bound)
    is_proven &= found.outcome in (Outcome.BEST, Outcome.TOO_LATE)
    ns = min(bound * model.unit_ns, model.most_ns) if bound is not None and is_proven else None
    away = {} if found.x is None else _away(model, found.x, op_ids)
    return Answer(ns, away, infeasible or found.outcome is Outcome.BEST, infeasible, spent)


@contextmanager
def _stdout_kept_clean() -> Iterator[None]:
    """Redirects stdout to stderr during a solve.

    HiGHS 1.12 sometimes prints a line of its own, but `--json` must print nothing but JSON.
    """
    flush_c = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.fstat(2)
    except OSError:  # a closed stream: nothing to protect, or nowhere else to print
        yield
        return
    try:
        flush_c(None)
        os.dup2(2, 1)
        yield
    finally:
        flush_c(None)
        os.dup2(kept, 1)
        os.close(kept)


def _away(
    model: BoundModel, x: Floats, op_ids: tuple[str, ...]
) -> dict[tuple[str, str | None], float]:
    return {
        (stay.gap.tensor, None if stay.gap.before is None else op_ids[stay.gap.before]): float(
            min(1.0, max(0.0, 1.0 - x[stay.stays]))
        )
        for stay in model.stays
        if stay.gap.free
    }
