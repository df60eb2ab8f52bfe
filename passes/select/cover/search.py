"""Searches for the cheapest cover of a need: knapsacks over weighted positions, then neighbours.

A knapsack covers a weighted sum of the needs, which is a relaxation; if its answer leaves a
position open, that position gets more weight in the next one. Each answer is completed, stripped of
redundant items and improved by swaps. Then the search explores the neighbourhood of the best: it
decides a few items at a time anew, by branch and bound, with the others fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from offcompile.passes.build.time_left import is_short

from .intervals import Choice, Cover, CoverItem

#: numbers of knapsacks; with fewer than ROUNDS the neighbourhood of the best is not searched either
ROUNDS, QUICK = 20, 3
#: decisions that the neighbourhood search may examine
NODES = 60_000
#: items decided anew at once; if there are no more than WHOLE, all of them
WINDOW, WIDE, WHOLE = 9, 13, 14
#: the search ends after this many failures in a row
IDLE = 500
#: number of items, each at least this fraction of the need, that are excluded on trial
GREAT, GREAT_PART = 2, 0.08

#: the cost of a choice (lower is better); it never falls when more items are taken
Objective = Callable[[Sequence[int | None]], float]


def cover(
    items: Sequence[CoverItem],
    need: Sequence[int],
    limits: Mapping[str, int] | None = None,
    rounds: int = ROUNDS,
) -> Choice | None:
    """Returns the cheapest choice found that covers `need` everywhere; None if none was found.

    `limits`: the total bytes that each tier can take (tiers not named: unlimited).
    """
    empty = Cover(items, need, limits or {})
    best: Cover | None = None
    weights = {empty.tightest(): 1} if empty.need else {}
    for number in range(2, rounds + 2):
        if is_short() and best is not None:
            break
        state = Cover(items, need, limits or {})
        state.take_knapsack(weights)
        # a solution of the weighted sum that covers all positions is optimal for all of them
        done = state.worst() <= 0
        at = state.tightest()
        if state.take_at_the_worst():
            state.polish()
            if best is None or state.cost() < best.cost():
                best = state
        if done:
            break
        weights[at] = weights.get(at, 0) + number
    if (best is None or rounds >= ROUNDS) and empty.take_greedily():
        empty.polish()
        if best is None or empty.cost() < best.cost():
            best = empty
    if best is not None and rounds >= ROUNDS and not is_short():
        for great in great_ones(items, best.choice, need):
            others = [CoverItem(x.nbytes, ()) if i == great else x for i, x in enumerate(items)]
            choice = cover(others, need, limits, rounds // 2)
            if choice is not None:
                state = Cover(items, need, limits or {})
                for i, way in enumerate(choice):
                    state.put(i, way)
                best = min(best, state, key=Cover.cost)
        improve(best, weights=weights)
    return None if best is None else tuple(best.choice)


def great_ones(
    items: Sequence[CoverItem], choice: Sequence[int | None], need: Sequence[int]
) -> list[int]:
    """Returns the largest items taken, if they matter.

    Replacing one of them by many small ones is too large a step for the neighbourhood search, so it
    is worth looking for a choice without them.
    """
    least = GREAT_PART * max(need, default=0)
    taken = [i for i, w in enumerate(choice) if w is not None and items[i].nbytes > least]
    return sorted(taken, key=lambda i: (-items[i].nbytes, i))[:GREAT]


def improve(
    state: Cover,
    objective: Objective | None = None,
    lowest: float = 0.0,
    nodes: int = NODES,
    weights: Mapping[int, int] | None = None,
) -> None:
    """Decides a few items anew at a time while that improves `objective` (None: the cost).

    The few are drawn, with a fixed seed, from the items whose cost per size is near the margin
    between taken and left, and from those on the wrong side of it. The search ends at `lowest`.
    """
    count = len(state.choice)
    usable = [i for i in range(count) if state.ways[i]]
    search = _Neighbourhood(state, objective, nodes)
    if len(usable) <= WHOLE:
        search.nodes = nodes * 10
        search.decide(usable)
        return
    rankings = []
    for prices in (weights or {}, {}):
        density = {i: _density(state, i, prices) for i in usable}
        rankings.append([i for _, i in sorted((density[i], i) for i in usable)])
    rng = Random(0)
    idle = turn = 0
    while search.nodes > 0 and search.best > lowest and idle < IDLE and not is_short():
        margin = sum(w is not None for w in state.choice)
        reach = max(WINDOW, count // 4)
        turn = (turn + 1) % 3
        pool = [
            i
            for at, i in enumerate(rankings[turn % 2])
            if turn == 2 or abs(at - margin) <= reach or (at < margin) != _taken(state, i)
        ]
        window = rng.sample(pool, min(WIDE if turn == 2 else WINDOW, len(pool)))
        idle = 0 if search.decide(window) else idle + 1


def _taken(state: Cover, i: int) -> bool:
    return state.choice[i] is not None


def _density(state: Cover, i: int, weights: Mapping[int, int]) -> float:
    """Returns the least cost of item `i` per weighted need that it covers."""
    best = float("inf")
    for way, (low, high) in zip(state.ways[i], state.ranges[i], strict=True):
        covered = sum(x / state.need[p] for p, x in weights.items() if low <= p < high)
        best = min(best, way.cost / (state.sizes[i] * (covered or 1e-9 if weights else 1.0)))
    return best


class _Neighbourhood:
    """Branch and bound over a few items; `nodes` is the number of nodes it may still visit."""

    def __init__(self, state: Cover, objective: Objective | None, nodes: int) -> None:
        self.state, self.objective, self.nodes = state, objective, nodes
        self.best = self.worth()

    def worth(self) -> float:
        return self.state.cost() if self.objective is None else self.objective(self.state.choice)

    def decide(self, window: Sequence[int]) -> bool:
        """Looks for better ways of the items in `window`, and takes them. True if there are any."""
        state = self.state
        before = [state.choice[i] for i in window]
        old_best = self.best
        self.found = before
        for i in window:
            state.put(i, None)
        self.order = sorted(window, key=lambda i: -state.sizes[i])
        self.left_over = [0]
        for i in reversed(self.order):
            self.left_over.append(self.left_over[-1] + state.sizes[i])
        self.window = window
        self._branch(0, self.worth())
        for i, way in zip(window, self.found, strict=True):
            state.put(i, way)
        return self.best < old_best

    def _branch(self, at: int, worth: float) -> None:
        state = self.state
        self.nodes -= 1
        if worth >= self.best * (1 - 1e-9) or self.nodes < 0:
            return
        worst = state.worst()
        if worst <= 0:
            self.best, self.found = worth, [state.choice[i] for i in self.window]
            return
        if worst > self.left_over[len(self.order) - at]:
            return
        i = self.order[at]
        for w, way in enumerate(state.ways[i]):
            if state.fits(i, w):
                state.put(i, w)
                self._branch(at + 1, worth + way.cost if self.objective is None else self.worth())
                state.put(i, None)
        self._branch(at + 1, worth)
