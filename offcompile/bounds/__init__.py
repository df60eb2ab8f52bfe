"""Proven lower bounds: no valid plan of the problem is faster (contract §2).

A bound holds for every plan: a free settled start, any tensor moved, direct access,
recomputation, codecs, host updates, every tier and lane. Like `makespan_us` itself it speaks of
the settled step of a steady problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from offcompile.ir import Machine, Problem

from .compute import Floor, compute_ns, floor_bytes
from .grid import Grid, coarse, fine
from .model import Model, build
from .solve import Answer, solve_lp, solve_milp
from .survey import Survey, survey

__all__ = ["Bound", "Floor", "floor_bytes", "lower_bound", "simple_lower_bound"]

#: columns that an LP may have, per second allowed (measured on chains; see the tests)
LP_COLUMNS_PER_SECOND = 4_000
LP_MOST_COLUMNS = 60_000
MILP_MOST_COLUMNS = 20_000
QUICK_COLUMNS = 2_500


@dataclass(frozen=True)
class Bound:
    """A makespan that no valid plan can beat.

    `method`: the argument that gave `us`: *compute* (every op runs), *traffic* (the LP with
    merged slots), *lp* or *milp*. `parts`: what each argument that was tried gave, in µs.
    `complete`: every argument meant for a problem of this size came to its end.
    `away_hints`: (tensor, op before the gap) → part of the tensor that is away in that gap in the
    best solution seen; gaps not named need no leaving.
    """

    us: float
    method: str
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    complete: bool = True
    away_hints: Mapping[tuple[str, str | None], float] = field(default_factory=dict, hash=False)
    #: the solver found that no plan at all can exist (not counted as a proof in `us`)
    infeasible: bool = False


def simple_lower_bound(problem: Problem, machine: Machine) -> float:
    """The compute part alone, in µs: quick, exact, and weak where memory is tight."""
    return compute_ns(problem, machine) / 1000


def lower_bound(problem: Problem, machine: Machine, seconds: float = 5.0) -> Bound:
    """The best bound that `seconds` can prove; never less than the compute part."""
    deadline = time.perf_counter() + seconds
    compute = compute_ns(problem, machine)
    best = Bound(compute / 1000, "compute", {"compute": compute / 1000})
    if not problem.ops:
        return best
    found = survey(problem, machine)
    if found.trivial:
        return best
    return _Search(found, compute, deadline).run()


class _Search:
    """From the cheapest argument to the dearest, while there is time."""

    def __init__(self, found: Survey, compute: int, deadline: float) -> None:
        self.found, self.deadline = found, deadline
        self.ids = tuple(o.id for o in found.problem.ops)
        self.best_ns, self.method = compute, "compute"
        self.parts = {"compute": compute / 1000}
        self.hints: Mapping[tuple[str, str | None], float] = {}
        self.complete, self.infeasible = True, False

    def left(self) -> float:
        return self.deadline - time.perf_counter()

    def run(self) -> Bound:
        grid = fine(self.found)
        size = columns_of(self.found, grid)
        affordable = min(LP_MOST_COLUMNS, LP_COLUMNS_PER_SECOND * max(0.0, self.left()))
        if size > affordable:
            self.complete = False
            for limit in (QUICK_COLUMNS, affordable):
                smaller = merged(self.found, limit)
                if self.left() > 0.05 * limit / LP_COLUMNS_PER_SECOND:
                    self._lp(build(self.found, smaller), "traffic")
            return self._bound()
        model = build(self.found, grid)
        if not self._lp(model, "lp") or self.infeasible:
            return self._bound()
        if model.program.integral.any():
            if model.program.n_columns <= MILP_MOST_COLUMNS and self.left() > 0.1:
                self._take(solve_milp(model, self.ids, self.left()), "milp", 1e-6)
            else:
                self.complete = False
        return self._bound()

    def _lp(self, model: Model, name: str) -> bool:
        answer = solve_lp(model, self.ids, self.left())
        self._take(answer, name, 1e-9)
        return answer.ns is not None

    def _take(self, answer: Answer, name: str, margin: float) -> None:
        """Round down by what the arithmetic may have got wrong, and a nanosecond."""
        self.complete &= answer.finished
        self.infeasible |= answer.infeasible
        if answer.away:
            self.hints = answer.away
        if answer.ns is not None:
            ns = math.floor(answer.ns * (1 - margin) - 1)
            self.parts[name] = max(ns / 1000, self.parts.get(name, 0.0))
            if ns > self.best_ns:
                self.best_ns, self.method = ns, name

    def _bound(self) -> Bound:
        return Bound(
            self.best_ns / 1000,
            self.method,
            self.parts,
            self.complete,
            self.hints,
            self.infeasible,
        )


def columns_of(found: Survey, grid: Grid) -> int:
    """About how many columns the program of a grid has."""
    per_slot = len(found.lanes) + 2 + len(found.tiers)
    inside = (grid.inside(g) for gaps in found.gaps.values() for g in gaps if g.free)
    return sum((len(i) + 1) * per_slot for i in inside)


def merged(found: Survey, limit: float) -> Grid:
    """The finest grid of merged slots whose program has about `limit` columns."""
    whole = columns_of(found, fine(found))
    gaps = sum(g.free for gaps in found.gaps.values() for g in gaps)
    per_gap = gaps * (len(found.lanes) + 2 + len(found.tiers))
    count = found.n_ops * max(0.0, limit - per_gap) / max(1, whole - per_gap)
    return coarse(found, max(2, int(count)))
