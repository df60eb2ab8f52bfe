"""The bound of one moment if recomputations need operands of their own.

In `cut` each recomputed tensor costs only its own op. Here the operands of that op have to be
present too: kept at that moment, carried out before it and back after it, or recomputed
themselves. For given weights of the lanes and a given price of a byte at that moment, the cheapest
choice is a minimum cut, and for any weights and price, its cost is a bound (weak duality).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linprog

from offcompile.bounds.survey import Floats, Survey
from offcompile.passes.select.min_cut import UNCUTTABLE, Network

from .choices import Cut
from .ways import IN_PLACE, Serving

#: limit on the choices examined; relative gap at which the search stops
MOST_CHOICES, CLOSE = 40, 1e-4
#: factors for finding the first price, from coarse to fine; limit on its rise after that
SCALES, MOST_RISE = (4.0, 2.0), 16.0
#: beyond this multiple of the typical price, the bound has no maximum
HOPELESS = 1e9
#: minimum weight of a lane at the start
LEAST = 1e-3
#: an upper limit of the cost of a tensor
DEAR_NS = float(1 << 50)


@dataclass(frozen=True, eq=False)
class ChainChoice:
    """The cheapest choice for some weights and price of a byte: the bound it proves, the busy
    time of lanes before and after the moment, and the bytes for which it has no room."""

    value: float
    price: float
    busy: list[Floats]
    missing: float


@dataclass(frozen=True, eq=False)
class ChainWay:
    """A way to have a tensor: on the device (lanes None), or moved out before and back after."""

    cost: float
    lanes: tuple[int, int] | None
    out: Serving
    back: Serving


class Chains:
    """The chains of one moment. lasting: tensors that are present for recomputations anyway.

    crossing: ways of a tensor out before the moment and back after it, one column per lane.
    """

    def __init__(
        self,
        survey: Survey,
        lasting: frozenset[str],
        crossing: Callable[[str], tuple[Serving, Serving]],
        cut: Cut,
    ) -> None:
        self.survey, self.lasting, self.crossing, self.cut = survey, lasting, crossing, cut
        self.row = {t: i for i, t in enumerate(cut.tensors)}

    def best(self, weights: list[Floats], deadline: float) -> float:
        """The best bound found, starting from these weights, in nanoseconds; 0: none.

        Each choice that was cheapest somewhere limits, for all weights and prices, the bound that
        they can prove. The search continues with those of the highest limit.
        """
        cut = self.cut
        chained = [i for i in range(len(cut.tensors)) if np.isfinite(cut.again[i])]
        impossible = len(cut.first) and not np.isfinite(cut.first.times).any(axis=1).all()
        if cut.excess <= 0 or not chained or impossible:
            return 0.0
        sizes = cut.nbytes[chained]
        # a typical price: the cost of recomputing a byte, without operands
        price = float(np.median(cut.again[chained] / np.maximum(sizes, 1.0)))
        weights = [np.maximum(w, LEAST) / np.maximum(w, LEAST).sum() for w in weights]
        best = self._climb(weights, price, deadline)
        if best.price >= price * HOPELESS:  # not even everything away is enough
            return 0.0
        known = [best]
        dearest = best.price * MOST_RISE
        while len(known) < MOST_CHOICES and time.thread_time() < deadline:
            weights, price, most = _most_promising(known, dearest)
            if most <= best.value * (1 + CLOSE):
                break
            known.append(self._value(weights, price))
            best = max(best, known[-1], key=lambda c: c.value)
        return best.value

    def _climb(self, weights: list[Floats], price: float, deadline: float) -> ChainChoice:
        """Climbs to the price of a byte that proves most with these weights: the only maximum."""
        found = self._value(weights, price)
        for scale in SCALES:
            for factor in (scale, 1 / scale):
                while found.price < price * HOPELESS and time.thread_time() < deadline:
                    tried = self._value(weights, found.price * factor)
                    if tried.value <= found.value:
                        break
                    found = tried
        return found

    def _value(self, weights: list[Floats], price: float) -> ChainChoice:
        """The bound that these weights and this price of a byte prove, and its choice."""
        cut, (before, after) = self.cut, weights
        busy = [np.zeros(len(before)), np.zeros(len(after))]
        busy[0][0], busy[1][0] = cut.compute
        if len(cut.first):
            picked = cut.first.prices(before).argmin(axis=1)
            busy[0] += cut.first.busy(picked, np.ones(len(picked)))
        value = price * (cut.excess - float(cut.nbytes.sum()))
        sides, inside = cut.sides.priced(before, after), cut.sides.inside
        room = price * cut.nbytes[cut.sides.row[inside]]
        gone = np.ones(len(inside))
        gone[inside] = sides.away[inside] <= sides.there[inside] + room
        busy = [b + x for b, x in zip(busy, sides.busy(gone), strict=True)]
        value += float(np.where(gone == 1, sides.away, sides.there).sum())
        value += float(((1 - gone[inside]) * room).sum())
        kept = float(((1 - gone[inside]) * cut.nbytes[cut.sides.row[inside]]).sum())
        ways_of = {t: self._having(t, weights, price) for t in cut.tensors}
        network, ops = Network(), self.survey.problem.ops
        seen: set[str] = set()
        waiting = []
        updated = set(cut.sides.row[inside].tolist())
        for i, t in enumerate(cut.tensors):
            if i in updated:
                continue  # included in the cost of its update
            if np.isfinite(cut.again[i]):
                network.from_source(("t", t), UNCUTTABLE)
                waiting.append(t)
            else:
                value += ways_of[t].cost
                kept += self._carry(t, ways_of[t], busy)
        again: set[int] = set()
        while waiting:
            t = waiting.pop()
            if t in seen:
                continue
            seen.add(t)
            if t not in ways_of:
                ways_of[t] = self._having(t, weights, price)
            cost = int(min(ways_of[t].cost, DEAR_NS))
            makers = self.survey.rewriters.get(t, ())
            if len(makers) > 1:
                continue  # runs may be shared in ways not modelled here, so it costs nothing
            if not makers:
                network.to_sink(("t", t), cost)
                continue
            (op,) = makers
            network.edge(("t", t), ("again", op), cost)
            if op in again:
                continue
            again.add(op)
            network.to_sink(("again", op), int(after[0] * self.survey.again_ns[op]))
            for u in ops[op].reads:
                if u not in self.lasting:
                    network.edge(("again", op), ("t", u), UNCUTTABLE)
                    waiting.append(u)
        side = network.source_side()
        for op in again:
            if ("again", op) in side:
                value += int(after[0] * self.survey.again_ns[op])
                busy[1][0] += self.survey.again_ns[op]
        for t in seen:
            makers = self.survey.rewriters.get(t, ())
            if ("t", t) not in side or len(makers) > 1:
                continue
            if not makers or ("again", makers[0]) not in side:
                value += int(min(ways_of[t].cost, DEAR_NS))
                kept += self._carry(t, ways_of[t], busy)
        value += _whatever_is_away(cut, before, after)
        ending = cut.ending.busy(after)
        value += float(ending @ after)
        busy[1] += ending
        missing = cut.excess - float(cut.nbytes.sum()) + kept
        return ChainChoice(value, price, busy, missing)

    def _having(self, t: str, weights: list[Floats], price: float) -> ChainWay:
        """The cheapest way to have the tensor after the moment without recomputing it."""
        before, after = weights
        row = self.row.get(t)
        nbytes = self.survey.problem.tensor[t].nbytes
        if row is not None:
            out, back = self.cut.out.of(row), self.cut.back.of(row)
        else:
            out, back = self.crossing(t)
            # a recomputation may read it in place, if that is allowed
            if t in self.survey.problem.in_place_ids:
                times = back.times.copy()
                times[IN_PLACE] = 0.0
                back = Serving(times, back.beside)
        outs, backs = out.prices(before), back.prices(after)
        i, j = int(np.argmin(outs)), int(np.argmin(backs))
        moved = float(outs[i] + backs[j])
        if moved < price * nbytes:
            return ChainWay(moved, (i, j), out, back)
        return ChainWay(price * nbytes, None, out, back)

    def _carry(self, t: str, way: ChainWay, busy: list[Floats]) -> int:
        """Adds the cost of having the tensor: busy lanes, or bytes on the device, returned."""
        if way.lanes is None:
            return self.survey.problem.tensor[t].nbytes
        out, back = way.lanes
        busy[0] += way.out.one_busy(out)
        busy[1] += way.back.one_busy(back)
        return 0


def _most_promising(known: list[ChainChoice], dearest: float) -> tuple[list[Floats], float, float]:
    """Weights and price for which the known choices allow the highest bound, and that bound."""
    width = len(known[0].busy[0]), len(known[0].busy[1])
    scale = max(1.0, max(c.value for c in known))
    # variables: weights before, weights after, the price as a share of the dearest, the bound
    rows = [
        [*(-c.busy[0] / scale), *(-c.busy[1] / scale), -c.missing * dearest / scale, 1.0]
        for c in known
    ]
    ones = [[1.0] * width[0] + [0.0] * (width[1] + 2), [0.0] * width[0] + [1.0] * width[1] + [0, 0]]
    bounds = [(0.0, 1.0)] * (sum(width) + 1) + [(0.0, None)]
    goal = [0.0] * (sum(width) + 1) + [-1.0]
    found = linprog(
        goal, A_ub=rows, b_ub=[0.0] * len(rows), A_eq=ones, b_eq=[1.0, 1.0], bounds=bounds
    )
    before, after = found.x[: width[0]], found.x[width[0] : sum(width)]
    return [before, after], float(found.x[-2] * dearest), float(found.x[-1] * scale)


def _whatever_is_away(cut: Cut, before: Floats, after: Floats) -> float:
    """The busy time of lanes that no choice avoids."""
    base = cut.compute[0] * before[0] + cut.compute[1] * after[0]
    if len(cut.first):
        base += float(cut.first.prices(before).min(axis=1).sum())
    return float(base)
