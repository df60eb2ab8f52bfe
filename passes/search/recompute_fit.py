"""Finds the least recomputation with which a step fits if nothing else saves memory, or if moves
save a part of it.

A kept byte has a price, and a minimum cut gives the reruns at that price (`rematerialization`).
Prices are tried from low to high until the step fits. Between that price and the next lower one,
only as many early layers pay the higher price as necessary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from offcompile.ir import DEVICE, Machine, Problem, Recompute
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.passes.select.footprint import footprint
from offcompile.passes.select.pressure import pressure
from offcompile.passes.select.rematerialization import NS_PER_US, Rematerialization, Rerun

#: price in ns at which keeping a tensor costs more than any op
DEAR = 1 << 40
#: uniform prices tried, from low to high, and halvings between the last one too low and the first
#: one high enough
PRICES, HALVINGS = 8, 4
#: numbers of parts that forward is cut into, at whose boundaries chains of reruns end; 1: no cut
FITTING_PARTS = (1, 24)
#: shares of the excess that move, while recomputation saves the rest
MOVED_PARTS = (0.0, 0.5, 0.25, 0.75, 0.9)


@dataclass(frozen=True)
class Rerunning:
    """A set of reruns, the time it adds, and the device memory needed with it."""

    reruns: frozenset[Rerun]
    added_us: float
    peak_bytes: int


@dataclass(eq=False)
class FittingReruns:
    """Recomputation choices for one problem in which only the tensors of `away` move."""

    problem: Problem
    away: tuple[Away, ...] = ()
    #: tensors at which rerun chains end
    kept: frozenset[str] = frozenset()
    _tried: dict[frozenset[Rerun], Rerunning] = field(default_factory=dict)

    @cached_property
    def choices(self) -> Rematerialization:
        return Rematerialization.of(self.problem)

    def decisions(self, reruns: Iterable[Rerun]) -> Decisions:
        return Decisions(away=self.away, recomputes=tuple(Recompute(*r) for r in sorted(reruns)))

    def of(self, reruns: frozenset[Rerun]) -> Rerunning:
        if reruns not in self._tried:
            peak = max(self._kept(reruns), default=0)
            added_us = sum(self.problem.op[op].duration_us for op, _ in reruns)
            self._tried[reruns] = Rerunning(reruns, added_us, peak)
        return self._tried[reruns]

    def _kept(self, reruns: frozenset[Rerun]) -> Sequence[int]:
        if self.away:
            return pressure(self.problem, self.decisions(reruns)).kept_bytes
        return footprint(self.problem, reruns)

    def budgeted(self, capacity: int) -> Rerunning:
        """Returns the fastest choice that fits, with one price for every kept byte."""
        found = [self.of(frozenset())]
        if found[0].peak_bytes <= capacity:
            return found[0]
        low = 0.0
        for price in self._prices():
            found.append(self._at(price, price, 1.0))
            if found[-1].peak_bytes <= capacity:
                found += self._between(low, price, capacity)
                break
            low = price
        return min(found, key=lambda r: rank(r, capacity))

    def _between(self, low: float, high: float, capacity: int) -> list[Rerunning]:
        """Returns choices with ever fewer early layers at the high price, while they fit."""
        found: list[Rerunning] = []
        fits, fails = 1.0, 0.0
        for _ in range(HALVINGS):
            share = (fits + fails) / 2
            found.append(self._at(low, high, share))
            if found[-1].peak_bytes <= capacity:
                fits = share
            else:
                fails = share
        return found

    def _at(self, low: float, high: float, share: float) -> Rerunning:
        """Evaluates `high` ns per byte for the first `share` of forward and `low` for the rest."""
        tensor, made = self.problem.tensor, self.choices.progress

        def price_ns(t: str) -> float:
            return (high if made[t] <= share else low) * tensor[t].nbytes

        return self.of(self.choices.reruns(price_ns, self.kept))

    def _prices(self) -> list[float]:
        """Returns prices from the cheapest byte to the dearest, in equal byte steps, and `DEAR`."""
        freed: dict[str, int] = {}
        for t in self.choices.saved:
            op = self.choices.maker[t]
            freed[op.id] = freed.get(op.id, 0) + self.problem.tensor[t].nbytes
        dear = sorted(
            (NS_PER_US * self.problem.op[op].duration_us / n, n) for op, n in freed.items() if n
        )
        total, passed = sum(n for _, n in dear), 0
        found: list[float] = []
        for price, n in dear:
            passed += n
            if passed * PRICES >= total * (len(found) + 1):
                found.append(price * (1 + 1e-6))
        return [*sorted({p for p in found if p > 0}), float(DEAR)]


def rank(r: Rerunning, capacity: int) -> tuple[bool, float, float]:
    """Ranks the fastest choice that fits first; if none fits, the one that needs least memory."""
    if r.peak_bytes <= capacity:
        return False, r.added_us, r.peak_bytes
    return True, r.peak_bytes, r.added_us


def reruns_beside_moves(problem: Problem, machine: Machine) -> Iterator[frozenset[Rerun]]:
    """Yields the least recomputation that fits with everything else on the device, if any, and the
    least beside which a share of the excess has to move. Yields nothing if weights move anyway."""
    capacity = machine.tier[DEVICE].capacity_bytes
    if capacity is None or any(
        t.home not in (None, DEVICE) and not t.pinned for t in problem.tensors
    ):
        return
    cuts, seen = Rematerialization.of(problem), {frozenset[Rerun]()}
    kept = [cuts.boundaries(parts) if parts > 1 else frozenset[str]() for parts in FITTING_PARTS]
    tries = [FittingReruns(problem, kept=ends) for ends in kept]
    for moved in MOVED_PARTS:
        for fitting in tries:
            too_much = max(0, fitting.of(frozenset()).peak_bytes - capacity)
            room = capacity + int(moved * too_much)
            found = fitting.budgeted(room)
            if found.peak_bytes <= room and found.reruns not in seen:
                seen.add(found.reruns)
                yield found.reruns
