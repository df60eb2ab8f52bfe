"""The bound of one moment if recomputations need operands of their own.

In `cut` each recomputed tensor costs only its own op. Here the operands of that op have to be
present too: kept at that moment, carried out before it and back after it, or recomputed
themselves. For given weights of the lanes and a given price of a byte at that moment, the cheapest
choice is a minimum cut, and for any weights and price, its cost is a bound (weak duality).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offcompile.bounds.highs import Constraints, Matrix, solve
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
    weights: list[Floats]
    price: float
    busy: list[Floats]
    missing: float


@dataclass(frozen=True, eq=False)
class _Reruns:
    """The network of what runs again: its cut separates tensors that are had in another way from
    ops that run for them. The capacities of its edges are set for each price.

    Tensors are numbers: rows of the moment first, then those that only recomputations read.
    """

    network: Network
    #: edges whose capacity is the cost of having a tensor, and of running an op
    edges: Mapping[int, int]
    ops: Mapping[int, int]
    #: for each tensor with an edge, the only op that makes it again; None: there is none
    maker: Mapping[int, int | None]

    def cut(self, having: Sequence[int], running: Mapping[int, int]) -> tuple[list[int], list[int]]:
        """The tensors that are had, and the ops that run again, at least cost."""
        for i, edge in self.edges.items():
            self.network.change(edge, having[i])
        for op, edge in self.ops.items():
            self.network.change(edge, running[op])
        side = self.network.source_side()
        again = [op for op in self.ops if ("again", op) in side]
        run = {*again}
        had = [i for i, op in self.maker.items() if ("t", i) in side and op not in run]
        return had, again


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
        self.survey, self.cut = survey, cut
        # the others are included in the costs of their updates
        free = np.ones(len(cut.tensors), dtype=bool)
        free[cut.sides.row[cut.sides.inside]] = False
        again = np.isfinite(cut.again)
        #: rows of tensors that may be recomputed, and of those that are carried or kept
        self.chained = np.flatnonzero(free & again).tolist()
        self.plain = np.flatnonzero(free & ~again).tolist()
        self.names = list(cut.tensors)
        # what has to be had anyway costs recomputations nothing
        had = lasting | {cut.tensors[i] for i in self.plain}
        self.reruns = self._reruns(had)
        others = [self._had_for_reruns(t, *crossing(t)) for t in self.names[len(cut.tensors) :]]
        size = survey.problem.tensor
        self.nbytes = np.array([size[t].nbytes for t in self.names], dtype=float)
        self.out = cut.out.and_rows([out for out, _ in others])
        self.back = cut.back.and_rows([back for _, back in others])

    def _reruns(self, had: frozenset[str]) -> _Reruns:
        network, ops = Network(), self.survey.problem.ops
        number = {t: i for i, t in enumerate(self.names)}
        found = _Reruns(network, edges := {}, running := {}, maker := {})
        waiting = list(self.chained)
        for i in self.chained:
            network.from_source(("t", i), UNCUTTABLE)
        while waiting:
            i = waiting.pop()
            makers = self.survey.rewriters.get(self.names[i], ())
            # several makers: runs may be shared in ways not modelled here, so it costs nothing
            if i in maker or len(makers) > 1:
                continue
            maker[i] = op = makers[0] if makers else None
            if op is None:
                edges[i] = network.to_sink(("t", i), 0)
                continue
            edges[i] = network.edge(("t", i), ("again", op), 0)
            if op in running:
                continue
            running[op] = network.to_sink(("again", op), 0)
            for t in ops[op].reads:
                if t not in had:
                    if t not in number:
                        number[t] = len(self.names)
                        self.names.append(t)
                    network.edge(("again", op), ("t", number[t]), UNCUTTABLE)
                    waiting.append(number[t])
        return found

    def _had_for_reruns(self, t: str, out: Serving, back: Serving) -> tuple[Serving, Serving]:
        """Ways to have a tensor that only recomputations read: in place too, if that is allowed."""
        if t not in self.survey.problem.in_place_ids:
            return out, back
        times = back.times.copy()
        times[IN_PLACE] = 0.0
        return out, Serving(times, back.beside)

    def best(self, weights: list[Floats], deadline: float) -> ChainChoice | None:
        """The choice of the best bound found, starting from these weights; None: there is none.

        Each choice that was cheapest somewhere limits, for all weights and prices, the bound that
        they can prove. The search continues with those of the highest limit.
        """
        if not self._has_choice:
            return None
        again, sizes = self.cut.again[self.chained], self.cut.nbytes[self.chained]
        # a typical price: the cost of recomputing a byte, without operands
        price = float(np.median(again / np.maximum(sizes, 1.0)))
        weights = [np.maximum(w, LEAST) / np.maximum(w, LEAST).sum() for w in weights]
        best = self._climb(weights, price, deadline)
        if best.price >= price * HOPELESS:  # not even everything away is enough
            return None
        known = [best]
        dearest = best.price * MOST_RISE
        while len(known) < MOST_CHOICES and time.thread_time() < deadline:
            weights, price, most = _most_promising(known, dearest)
            if most <= best.value * (1 + CLOSE):
                break
            known.append(self._value(weights, price))
            best = max(best, known[-1], key=lambda c: c.value)
        return best

    def like(self, other: ChainChoice) -> ChainChoice | None:
        """The choice with the weights and the price of another moment's; None: there is none."""
        return self._value(other.weights, other.price) if self._has_choice else None

    @property
    def _has_choice(self) -> bool:
        """True if something has to leave or run again, and all that must be loaded can be."""
        first = self.cut.first
        possible = not len(first) or np.isfinite(first.times).any(axis=1).all()
        return bool(self.chained and self.cut.excess > 0 and possible)

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
        held = price * cut.nbytes[cut.sides.row[inside]]
        gone = np.ones(len(inside))
        gone[inside] = sides.away[inside] <= sides.there[inside] + held
        busy = [b + x for b, x in zip(busy, sides.busy(gone), strict=True)]
        value += float(np.where(gone == 1, sides.away, sides.there).sum())
        value += float(((1 - gone[inside]) * held).sum())
        kept = float(((1 - gone[inside]) * cut.nbytes[cut.sides.row[inside]]).sum())
        outs, backs = self.out.prices(before), self.back.prices(after)
        by_out, by_back = outs.argmin(axis=1), backs.argmin(axis=1)
        rows = np.arange(len(self.names))
        moved, room = outs[rows, by_out] + backs[rows, by_back], price * self.nbytes
        cost = np.minimum(moved, room)
        running = {i: int(after[0] * self.survey.again_ns[i]) for i in self.reruns.ops}
        having = np.minimum(cost, DEAR_NS).astype(np.int64).tolist()
        had, again = self.reruns.cut(having, running)
        value += float(cost[self.plain].sum())
        value += sum(having[i] for i in had) + sum(running[op] for op in again)
        busy[1][IN_PLACE] += sum(self.survey.again_ns[op] for op in again)
        needed = np.zeros(len(self.names))
        needed[self.plain] = needed[had] = 1.0
        carried = needed * (moved < room)
        busy[0] += self.out.busy(by_out, carried)
        busy[1] += self.back.busy(by_back, carried)
        kept += float((needed - carried) @ self.nbytes)
        value += _whatever_is_away(cut, before, after)
        ending = cut.ending.busy(after)
        value += float(ending @ after)
        busy[1] += ending
        missing = cut.excess - float(cut.nbytes.sum()) + kept
        return ChainChoice(value, weights, price, busy, missing)


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
    most = [1.0] * (sum(width) + 1) + [np.inf]
    goal = [0.0] * (sum(width) + 1) + [-1.0]
    limits = Constraints(Matrix.dense(rows, len(goal)), [0.0] * len(rows))
    x = solve(goal, limits, Constraints(Matrix.dense(ones, len(goal)), [1.0, 1.0]), most=most).x
    assert x is not None  # any weights that add up to one will do
    before, after = x[: width[0]], x[width[0] : sum(width)]
    return [before, after], float(x[-2] * dearest), float(x[-1] * scale)


def _whatever_is_away(cut: Cut, before: Floats, after: Floats) -> float:
    """The busy time of lanes that no choice avoids."""
    base = cut.compute[0] * before[0] + cut.compute[1] * after[0]
    if len(cut.first):
        base += float(cut.first.prices(before).min(axis=1).sum())
    return float(base)
