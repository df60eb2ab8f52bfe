"""Finds the weights of the lanes that prove most at one moment, by a small linear program.

Any weights prove a bound; the best ones are the prices of the lanes in the shortest step with
fractional choices. Layers are alike, so equal choices are counted instead of listed: a net of
thousands of tensors has a few dozen of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offcompile.bounds.highs import Constraints, Matrix, Outcome, solve
from offcompile.bounds.survey import Floats

from .choices import Cut
from .sides import Legs
from .ways import IN_PLACE, entries

#: nanoseconds per unit of time in the program
UNIT_NS = 1e6
GIB = float(1 << 30)
#: a way: row of a lane → ns
Way = Mapping[int, float]


class _Program:
    """Inequalities (at most 0 by default) and equalities over columns that are at least 0."""

    def __init__(self, cut: Cut) -> None:
        self.width = cut.out.times.shape[1]
        self.entries: list[tuple[bool, int, int, float]] = []  # (equality, row, column, value)
        self.limits: list[float] = []
        self.sums: list[float] = []
        self.columns = 0
        for side in range(2):
            busy = cut.compute[side] / UNIT_NS
            self.limits += [-busy, *[0.0] * (self.width - 1)]
        times = [self.column() for _ in range(2)]
        for lane in range(2 * self.width):
            self.put(lane, times[lane // self.width], -1.0)
        self.room = self.at_most(-cut.excess / GIB)
        self.room_at_end = self.at_most(-cut.ending.excess / GIB)

    def column(self) -> int:
        self.columns += 1
        return self.columns - 1

    def at_most(self, limit: float) -> int:
        self.limits.append(limit)
        return len(self.limits) - 1

    def equal(self, total: float) -> int:
        self.sums.append(total)
        return len(self.sums) - 1

    def put(self, row: int, column: int, value: float) -> None:
        self.entries.append((False, row, column, value))

    def put_equal(self, row: int, column: int, value: float) -> None:
        self.entries.append((True, row, column, value))

    def spread(self, total: int, ways: Iterable[Way]) -> None:
        """Distributes the amount that the equality `total` requires over ways."""
        for way in ways:
            column = self.column()
            self.take(column, way)
            self.put_equal(total, column, 1.0)

    def take(self, column: int, way: Way) -> None:
        """Makes a unit of the column take the time of a way."""
        for lane, ns in way.items():
            self.put(lane, column, ns / UNIT_NS)

    def free(self, column: int, nbytes: float) -> None:
        """Makes a unit of the column free `nbytes` of memory."""
        self.put(self.room, column, -nbytes / GIB)

    def solve(self) -> tuple[Floats, Floats] | None:
        def rows(equal: bool, limits: list[float]) -> Constraints:
            mine = [e[1:] for e in self.entries if e[0] == equal]
            at, columns, values = zip(*mine, strict=True) if mine else ((), (), ())
            shape = len(limits), self.columns
            return Constraints(Matrix.of(at, columns, values, shape), limits)

        goal = np.zeros(self.columns)
        goal[:2] = 1.0
        found = solve(goal, rows(False, self.limits), rows(True, self.sums))
        if found.outcome is not Outcome.BEST or found.row_duals is None:
            return None
        lanes = np.maximum(-found.row_duals[: 2 * self.width], 0.0)
        return _to_one(lanes[: self.width]), _to_one(lanes[self.width :])


def _to_one(weights: Floats) -> Floats:
    """The weights scaled to add up to one; all of it on the compute lane if nothing weighs."""
    whole = float(weights.sum())
    return weights / whole if whole else np.eye(len(weights))[IN_PLACE]


def best_weights(cut: Cut) -> tuple[Floats, Floats] | None:
    """The weights of the lanes before and after the moment; None if the LP has no solution."""
    program = _Program(cut)
    width = program.width
    updated = set(cut.sides.row[cut.sides.inside].tolist())
    kinds = Counter(
        (float(cut.nbytes[i]), cut.out.key(i), cut.back.key(i), float(cut.again[i]))
        for i in range(len(cut.nbytes))
        if i not in updated
    )
    for (nbytes, out, back, again), count in kinds.items():
        most = program.at_most(float(count))
        carried = program.column()
        program.put(most, carried, 1.0)
        program.free(carried, nbytes)
        for ways, first in ((out, 0), (back, width)):
            total = program.equal(0.0)
            program.put_equal(total, carried, -1.0)
            program.spread(total, _shifted(ways, first))
        if np.isfinite(again):
            anew = program.column()
            program.put(most, anew, 1.0)
            program.put(width, anew, again / UNIT_NS)
            program.free(anew, nbytes)
    for ways, count in Counter(map(cut.first.key, range(len(cut.first)))).items():
        program.spread(program.equal(float(count)), _shifted(ways, 0))
    late = cut.ending
    kinds_made = Counter((late.nbytes[i], late.out.key(i)) for i in range(len(late.nbytes)))
    for (nbytes, ways), count in kinds_made.items():
        most = program.at_most(float(count))
        for way in _shifted(ways, width):
            column = program.column()
            program.put(most, column, 1.0)
            program.take(column, way)
            program.put(program.room_at_end, column, -nbytes / GIB)
    for update, count in Counter(_updates(cut)).items():
        _add_update(program, update, count)
    return program.solve()


def _shifted(key: tuple[Sequence[float], Sequence[float]], first: int) -> Iterable[Way]:
    """The ways behind a key, on the rows of lanes that begin at `first`."""
    return ({first + lane: ns for lane, ns in way.items()} for way in entries(*key))


#: for each leg of an update, its ways: (row of a lane, ns)
LegWays = tuple[tuple[tuple[int, float], ...], ...]


@dataclass(frozen=True)
class _Update:
    """The work of an update on each side, and the bytes of its states (0: they need no room)."""

    nbytes: float
    host: LegWays
    device: LegWays
    late: LegWays
    early: LegWays


def _updates(cut: Cut) -> Iterable[_Update]:
    sides = cut.sides
    host, device, late, early = map(_by_owner, (sides.host, sides.device, sides.late, sides.early))
    for i, row in enumerate(sides.row.tolist()):
        nbytes = float(cut.nbytes[row]) if row >= 0 else 0.0
        legs = (found.get(i, ()) for found in (host, device, late, early))
        yield _Update(nbytes, *legs)


def _by_owner(legs: Legs) -> Mapping[int, LegWays]:
    found: dict[int, LegWays] = {}
    for owner, ways in zip(legs.owners, legs.ways, strict=True):
        found[owner] = (*found.get(owner, ()), tuple(sorted(ways.items())))
    return found


def _add_update(program: _Program, update: _Update, count: int) -> None:
    """Each runs on the host, or on the device with its states loaded after or before the moment."""
    total = program.equal(float(count))
    choices = [(update.host, True), (update.device + update.late, True)]
    if update.nbytes:
        choices.append((update.device + update.early, False))
    for legs, away in choices:
        column = program.column()
        program.put_equal(total, column, 1.0)
        if away:
            program.free(column, update.nbytes)
        for leg in legs:
            share = program.equal(0.0)
            program.put_equal(share, column, -1.0)
            program.spread(share, ({lane: ns} for lane, ns in leg))
