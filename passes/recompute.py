"""Recomputes activations instead of keeping them, until the step fits in memory.

`benefit` drops the outputs that free most bytes over the step per nanosecond of added compute. This
is the same covering problem as for moves; the answer is then checked with the memory that
recomputation itself needs. `sqrt` keeps evenly spaced checkpoints, as few as fit; `all` drops
everything that can be recomputed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from offcompile.ir import (
    DEVICE,
    Infeasible,
    Machine,
    Plan,
    Problem,
    Recompute,
)

from .build.contract import Judge
from .build.decisions import Decisions
from .build.time_left import is_short
from .search.recompute_starts import recipes_of
from .search.trials import Trials
from .select.cover.intervals import CoverItem, CoverWay
from .select.cover.search import QUICK, ROUNDS, cover
from .select.droppable import droppable_ops, recomputes_for
from .select.footprint import footprint, order_of

VARIANTS = ("benefit", "all", "sqrt")
#: number of fitting minimum cuts that are built
MOST_CUTS = 2
#: number of times that the memory of the recomputation itself is added to the need
REPAIRS = 8
#: with more candidate ops than this, the choice is made by a quicker search
THOROUGH = 120
#: runs examined while trying to keep outputs after all
TRIM_WORK = 20_000
#: shares of the excess covered by recomputation if moves take the rest
SHARES = (0.125, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Recomputation:
    """Reruns ops marked `recompute` where their outputs are read after a long gap."""

    name: ClassVar[str] = "recompute"

    variant: str = "benefit"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            known = ", ".join(VARIANTS)
            raise ValueError(f"variant is {self.variant!r}; it must be one of {known}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        trials = Trials(problem, machine, self.judge)
        drops = _Drops(problem, machine)
        excess = max(drops.base, default=0)
        if excess <= 0:
            sets: list[Sequence[str]] = [()]
        elif self.variant == "all":
            sets = [drops.names]
        elif self.variant == "sqrt":
            sets = _first_fitting(drops, spread_sets(drops.names))
        else:
            sets = _benefit_sets(drops)
            for again in _cuts(drops):
                trials.attempt(Decisions(recomputes=again))
        for dropped in sets:
            trials.attempt(Decisions(recomputes=drops.reruns(dropped)))
        if trials.best is None:
            if excess <= 0 and trials.error is not None:
                raise trials.error  # not caused by activations
            raise _does_not_fit(drops, sets, trials.refused)
        return trials.best


class _Drops:
    """Sets of dropped ops of one step, each with its reruns and what it comes to."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem, self.machine = problem, machine
        self.droppable = droppable_ops(problem)
        self.names = [d.op for d in self.droppable]
        self._reruns: dict[frozenset[str], tuple[Recompute, ...]] = {}
        self._excess: dict[tuple[Recompute, ...], tuple[list[int], int]] = {}
        self.base = self.excess_of(())[0]

    def reruns(self, dropped: Sequence[str]) -> tuple[Recompute, ...]:
        key = frozenset(dropped)
        if key not in self._reruns:
            self._reruns[key] = recomputes_for(self.problem, self.droppable, dropped)
        return self._reruns[key]

    def excess(self, dropped: Sequence[str]) -> tuple[list[int], int]:
        """The bytes over the capacity at each op, and the added compute time."""
        return self.excess_of(self.reruns(dropped))

    def excess_of(self, again: tuple[Recompute, ...]) -> tuple[list[int], int]:
        if again not in self._excess:
            self._excess[again] = _excess(self.problem, self.machine, again)
        return self._excess[again]


def spread_sets(ops: Sequence[str]) -> list[list[str]]:
    """Returns all ops but every k-th, for k from 2 up, including the square root of the count."""
    steps: list[int] = []
    k = 2
    while k < 2 * len(ops):
        steps.append(k)
        k += max(1, k // 3)
    root = max(2, round(len(ops) ** 0.5))
    return [[op for i, op in enumerate(ops) if (i + 1) % k] for k in sorted({*steps, root})]


def _excess(
    problem: Problem, machine: Machine, recomputes: tuple[Recompute, ...]
) -> tuple[list[int], int]:
    """Returns the excess at each op (its recomputations included), and the added compute time."""
    reruns = [(r.op, r.before) for r in recomputes]
    kept = footprint(problem, reruns)
    capacity = machine.tier[DEVICE].capacity_bytes
    limit = max(kept, default=0) if capacity is None else capacity
    at_ops: list[int] = []
    most: int | None = None
    for op, nbytes in zip(order_of(problem, reruns), kept, strict=True):
        most = nbytes - limit if most is None else max(most, nbytes - limit)
        if op == len(at_ops):
            at_ops.append(most)
            most = None
    added = sum(round(1000 * problem.op[r.op].duration_us) for r in recomputes)
    return at_ops, added


def _first_fitting(drops: _Drops, sets: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Returns up to two sets that fit, least added compute first; the first set if none fits."""
    fitting = []
    for i, dropped in enumerate(sets):
        over, added = drops.excess(dropped)
        if max(over, default=0) <= 0:
            fitting.append((added, i))
    return [sets[i] for _, i in sorted(fitting)[:2]] or list(sets[:1])


def _benefit_sets(drops: _Drops, trims: int = 3) -> list[Sequence[str]]:
    """Returns the sets that fit with the least added compute, without drops that are not needed."""
    starts = _covering_starts(drops, drops.base)
    starts += [*spread_sets(drops.names), drops.names]
    scored = []
    for i, dropped in enumerate(starts):
        over, added = drops.excess(dropped)
        if max(over, default=0) <= 0:
            scored.append((added, i))
    trimmed = [_trim(drops, starts[i]) for _, i in sorted(scored)[:trims]]
    trimmed.sort(key=lambda x: x[0])
    return [dropped for _, dropped in trimmed]


def _cuts(drops: _Drops) -> list[tuple[Recompute, ...]]:
    """Returns minimum cuts that fit, least added compute first.

    Blocks that are recomputed as a whole are among them.
    """
    fitting = []
    for i, reruns in enumerate(recipes_of(drops.problem)):
        again = tuple(Recompute(*rerun) for rerun in sorted(reruns))
        over, added = drops.excess_of(again)
        if max(over, default=0) <= 0:
            fitting.append((added, i, again))
        if is_short() and fitting:
            break
    return [again for _, _, again in sorted(fitting)[:MOST_CUTS]]


def _covering_starts(drops: _Drops, base: Sequence[int]) -> list[Sequence[str]]:
    """Covers the excess, repeatedly adding the memory that recomputations and their inputs need."""
    droppable = drops.droppable
    items = [
        CoverItem(d.nbytes, (CoverWay(d.first, d.last, float(max(1, d.duration_ns))),))
        for d in droppable
    ]
    coverable = [0] * len(base)
    for d in droppable:
        for at in range(d.first, d.last + 1):
            coverable[at] += d.nbytes
    need = [min(n, c) for n, c in zip(base, coverable, strict=True)]
    found: list[Sequence[str]] = []
    for _ in range(REPAIRS):
        choice = cover(items, need, rounds=ROUNDS if len(items) <= THOROUGH else QUICK)
        if choice is None:
            break
        dropped = [d.op for d, way in zip(droppable, choice, strict=True) if way is not None]
        found.append(dropped)
        over, _ = drops.excess(dropped)
        if max(over) <= 0:
            break
        more = [min(n + max(0, o), c) for n, o, c in zip(need, over, coverable, strict=True)]
        if more == need:
            break
        need = more
    return found


def _trim(drops: _Drops, dropped: Sequence[str]) -> tuple[int, Sequence[str]]:
    """Keeps outputs that need not be dropped after all, most expensive first."""
    duration = {d.op: d.duration_ns for d in drops.droppable}
    kept = sorted(dropped, key=lambda x: (-duration[x], x))
    _, best = drops.excess(kept)
    tries = max(16, TRIM_WORK // max(1, len(drops.problem.ops)))
    # try half of them at once, and if that fails, half of that half
    groups = [kept[len(kept) // 2 :], kept[: len(kept) // 2]]
    while groups and tries and not is_short():
        group = groups.pop()
        fewer = [x for x in kept if x not in set(group)]
        over, added = drops.excess(fewer)
        tries -= 1
        if group and max(over, default=0) <= 0 and added <= best:
            kept, best = fewer, added
        elif len(group) > 1:
            groups += [group[len(group) // 2 :], group[: len(group) // 2]]
    return best, kept


def partial_sets(problem: Problem, machine: Machine) -> list[tuple[Recompute, ...]]:
    """Returns recomputations for shares of the excess (other policies do the rest) and for all."""
    drops = _Drops(problem, machine)
    sets: list[Sequence[str]] = []
    for share in SHARES:
        part = [int(share * x) if x > 0 else x for x in drops.base]
        sets += _covering_starts(drops, part)[:1]
    sets += _benefit_sets(drops, trims=1)
    return [again for again in dict.fromkeys(map(drops.reruns, sets)) if again]


def _does_not_fit(drops: _Drops, sets: Sequence[Sequence[str]], refused: str) -> Infeasible:
    """Builds the error, with the bytes still missing after the best recomputation."""
    problem, machine, droppable = drops.problem, drops.machine, drops.droppable
    missing = max(drops.base, default=0)
    tried = [drops.reruns(s) for s in sets or [*spread_sets(drops.names), drops.names]]
    tried += [tuple(Recompute(*rerun) for rerun in sorted(r)) for r in recipes_of(problem)]
    for again in tried:
        over, _ = drops.excess_of(again)
        missing = min(missing, max(over, default=0))
    capacity = machine.tier[DEVICE].capacity_bytes
    if missing <= 0 or capacity is None:
        return Infeasible(
            f"The device is large enough, and yet the plan does not run. {refused}",
            None,
            "Raise the budgets of the other tiers, or let tensors move too (policy joint).",
        )
    return Infeasible(
        f"Recomputation alone does not fit the device: {len(droppable)} ops can run again, and"
        f" {missing:,} bytes are still missing over the budget of {capacity:,}.",
        missing,
        f"Raise the device budget to {capacity + missing:,} bytes, mark more ops for"
        " recomputation, or let tensors move too (policy joint).",
    )
