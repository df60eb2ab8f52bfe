"""Proven lower bounds: no valid plan of the problem is faster (contract §2).

A bound holds for every plan: with any settled start, any moves, direct accesses, recomputations,
codecs and host updates, on every tier and lane. Like `makespan_us` itself, it refers to the
settled step of a steady problem.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from offcompile.ir import Machine, Problem

from .compute import Floor, compute_ns, floor_bytes
from .moment.cut import cut_bound
from .program.grid import Grid, coarse, fine, full
from .program.merge import MERGED, merged_tensors
from .program.model import BoundModel, build
from .program.solve import Answer, solve_lp, solve_milp
from .survey import Survey, survey

__all__ = ["Bound", "Floor", "floor_bytes", "lower_bound", "simple_lower_bound"]

#: size of an LP that takes about a second; the time grows with the square
COLUMNS_OF_A_SECOND = 6_500
FIRST_SLOTS = 16
#: largest sizes for a MILP, and for a MILP in which space is integral too
MILP_COLUMNS = 12_000
WHOLE_COLUMNS = 5_000
WHOLE_SLOTS = 8
#: share of the time for the bound of one moment, if it is tried, and its minimum
CUT_SHARE, LEAST_CUT_SECONDS = 0.5, 0.1


@dataclass(frozen=True)
class Bound:
    """A makespan that no valid plan can beat.

    `method`: the argument that gave `us`: *compute* (every op runs), *cut* (transfers before and
    after one moment), *traffic* (the LP with merged slots), *lp* or *milp*. `parts`: the result of
    each argument that was tried, in µs.
    `complete`: every argument meant for a problem of this size was carried through.
    `away_hints`: (tensor, op before the gap) → part of the tensor that is away in that gap in the
    best solution seen; gaps not named need no eviction.
    """

    us: float
    method: str
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    complete: bool = True
    away_hints: Mapping[tuple[str, str | None], float] = field(default_factory=dict, hash=False)
    #: the solver found that no plan exists (not counted as a proof in `us`)
    infeasible: bool = False


def simple_lower_bound(problem: Problem, machine: Machine) -> float:
    """The compute part alone, in µs: quick, exact, and weak if memory is tight."""
    return compute_ns(problem, machine) / 1000


def lower_bound(
    problem: Problem, machine: Machine, seconds: float = 5.0, first_slots: int = FIRST_SLOTS
) -> Bound:
    """The best bound that `seconds` can prove; never less than the compute part.

    first_slots: those of the first LP with merged slots. A few need little time, and seldom prove
    more than the bound of one moment.
    """
    deadline = time.thread_time() + seconds
    compute = compute_ns(problem, machine)
    best = Bound(compute / 1000, "compute", {"compute": compute / 1000})
    if not problem.ops:
        return best
    found = survey(problem, machine)
    if found.trivial:
        return best
    return _BoundSearch(found, compute, deadline, first_slots).run()


class _BoundSearch:
    """Tries the arguments from the cheapest to the most expensive, while there is time."""

    def __init__(self, found: Survey, compute: int, deadline: float, first_slots: int) -> None:
        self.found, self.deadline, self.first_slots = found, deadline, first_slots
        self.ids = tuple(o.id for o in found.problem.ops)
        self.best_ns, self.method = compute, "compute"
        self.parts = {"compute": compute / 1000}
        self.hints: Mapping[tuple[str, str | None], float] = {}
        self.complete, self.infeasible = True, False
        self.columns_of_a_second = float(COLUMNS_OF_A_SECOND)

    def left(self) -> float:
        return self.deadline - time.thread_time()

    def run(self) -> Bound:
        whole = full(self.found)
        columns = columns_of(self.found, whole)
        if columns > WHOLE_COLUMNS:
            whole = fine(self.found)
            columns = columns_of(self.found, whole)
        if self._seconds(columns) > 0.3 * self.left():
            self._cut()
            self._ladder()
        if self._seconds(columns) > self.left():
            self.complete = False
            return self._bound()
        model = self._lp(self.found, whole, "lp")
        if model is not None and model.program.integral.any():
            self._milp(model, whole)
        return self._bound()

    def _seconds(self, columns: int) -> float:
        """Estimates the seconds of an LP from the last LP, or from a default before the first."""
        return (columns / self.columns_of_a_second) ** 2

    def _cut(self) -> None:
        if not self.found.problem.steady:
            seconds = max(CUT_SHARE * self.left(), LEAST_CUT_SECONDS)
            self._prove(cut_bound(self.found, time.thread_time() + seconds), "cut", 1e-9)

    def _ladder(self) -> None:
        """Solves LPs with merged slots, ever finer, while the next one surely fits the time."""
        count = self.first_slots
        while count < self.found.n_ops:
            grid = coarse(self.found, count)
            merged = merged_tensors(self.found, grid)
            if self._seconds(columns_of(merged, grid)) > 0.8 * self.left():
                return
            if self._lp(merged, grid, "traffic") is None:
                return
            count = count * 3 // 2

    def _milp(self, model: BoundModel, finest: Grid) -> None:
        """Solves MILPs with integral departures, then also with integral space, in finer slots."""
        columns, n = model.program.n_columns, self.found.n_ops
        if columns > MILP_COLUMNS or self.left() < 0.1:
            self.complete = False
            return
        self._take(solve_milp(model, self.ids, self.left() / 4), "milp", 1e-6)
        count = WHOLE_SLOTS
        while columns <= WHOLE_COLUMNS and self.left() > 0.1:
            grid = finest if 3 * count > 2 * n else coarse(self.found, count)
            answer = solve_milp(build(self.found, grid, whole=True), self.ids, self.left())
            self._take(answer, "milp", 1e-6, hints=grid is finest and answer.finished)
            if not answer.finished or grid is finest:
                return
            count = count * 3 // 2
        self.complete &= columns > WHOLE_COLUMNS

    def _lp(self, found: Survey, grid: Grid, name: str) -> BoundModel | None:
        """Solves the LP and uses its bound; returns the model if there is a solution."""
        if self.left() <= 0:
            self.complete = False
            return None
        model = build(found, grid)
        answer = solve_lp(model, self.ids, self.left())
        self._take(answer, name, 1e-9)
        seen = model.program.n_columns / math.sqrt(max(answer.seconds, 0.01))
        self.columns_of_a_second = max(COLUMNS_OF_A_SECOND / 2, 0.8 * seen)
        return model if answer.ns is not None else None

    def _take(self, answer: Answer, name: str, margin: float, hints: bool = True) -> None:
        """Uses an answer, rounded down by its possible arithmetic error and a nanosecond."""
        self.complete &= answer.finished
        self.infeasible |= answer.infeasible
        if answer.away and hints:
            self.hints = {k: v for k, v in answer.away.items() if not k[0].startswith(MERGED)}
        if answer.ns is not None:
            self._prove(answer.ns, name, margin)

    def _prove(self, bound_ns: float, name: str, margin: float) -> None:
        ns = math.floor(bound_ns * (1 - margin) - 1)
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
    """The approximate number of columns in the program of a grid."""
    per_slot = len(found.lanes) + 2 + len(found.tiers)
    inside = (grid.inside(g) for gaps in found.gaps.values() for g in gaps if g.free)
    return sum((len(i) + 1) * per_slot for i in inside)
