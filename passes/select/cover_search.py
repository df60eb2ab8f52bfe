"""The cheapest choice that covers a need: knapsacks over weighted positions, then neighbours.

A knapsack covers a weighted sum of the needs, which is a relaxation; where its answer leaves some
position open, that position weighs more in the next one. Each answer is completed, freed of what
is redundant and improved by swaps. The best is then searched around: a few things at a time are
decided anew, by branch and bound, with the others as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random

from offcompile.passes.build.patience import is_short

from .covering import Choice, Cover, Item

#: knapsacks; with fewer than ROUNDS there is no search around the best choice either
ROUNDS, QUICK = 20, 3
#: how many decisions the search around the best choice may look at
NODES = 60_000
#: things decided anew at once; where there are no more than WHOLE, all of them
WINDOW, WIDE, WHOLE = 9, 13, 14
#: so many times in vain, and the search ends
IDLE = 500
#: so many things of at least this part of the need are done without on trial
GREAT, GREAT_PART = 2, 0.08

#: the worth of a choice (less is better), which taking more things never lowers
Objective = Callable[[Sequence[int | None]], float]


def cover(
    items: Sequence[Item],
    need: Sequence[int],
    limits: Mapping[str, int] | None = None,
    rounds: int = ROUNDS,
) -> Choice | None:
    """The cheapest choice found that covers `need` everywhere; None if none was found.

    `limits`: the bytes that a tier takes in altogether (tiers not named: any).
    """
    empty = Cover(items, need, limits or {})
    best: Cover | None = None
    weights = {empty.tightest(): 1} if empty.need else {}
    for number in range(2, rounds + 2):
        if is_short() and best is not None:
            break
        state = Cover(items, need, limits or {})
        state.take_knapsack(weights)
        # a solution of the weighted sum that covers all positions is optimal for them all
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
            others = [Item(x.nbytes, ()) if i == great else x for i, x in enumerate(items)]
            choice = cover(others, need, limits, rounds // 2)
            if choice is not None:
                state = Cover(items, need, limits or {})
                for i, way in enumerate(choice):
                    state.put(i, way)
                best = min(best, state, key=Cover.cost)
        improve(best, weights=weights)
    return None if best is None else tuple(best.choice)


def great_ones(
    items: Sequence[Item], choice: Sequence[int | None], need: Sequence[int]
) -> list[int]:
    """The greatest things taken, if they matter: one of them against many small ones is more than
    the search around a choice can exchange, so it is worth looking for a choice without them."""
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
    """Decide a few things anew at a time while that betters `objective` (None: the cost).

    The few are drawn, with a fixed seed, from those whose cost per size is near the margin
    between taken and left, and from those on the wrong side of it. `lowest` ends the search.
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
    """The least cost of thing `i` per weighted need that it covers."""
    best = float("inf")
    for way, (low, high) in zip(state.ways[i], state.ranges[i], strict=True):
        covered = sum(x / state.need[p] for p, x in weights.items() if low <= p < high)
        best = min(best, way.cost / (state.sizes[i] * (covered or 1e-9 if weights else 1.0)))
    return best


class _Neighbourhood:
    """Branch and bound over a few things; `nodes` is what may still be looked at."""

    def __init__(self, state: Cover, objective: Objective | None, nodes: int) -> None:
        self.state, self.objective, self.nodes = state, objective, nodes
        self.best = self.worth()

    def worth(self) -> float:
        return self.state.cost() if self.objective is None else self.objective(self.state.choice)

    def decide(self, window: Sequence[int]) -> bool:
        """Whether some other ways of the things in `window` are better; they are taken if so."""
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
