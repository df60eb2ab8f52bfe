"""Lets host and device take turns with the updates where the links are what a step waits for.

While the host takes the first gradients and the device the last ones, the link out of the device
carries little until the device begins, and then has too much to carry. If both take turns from
the first gradient on, states cross during all of backward. Activations that cross beside them then
cost more than computing them again, since compute has time to spare, so more of forward runs again
as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from offcompile.passes.select.gap_set import GapSet, Prices
from offcompile.passes.select.rematerialization import Rerun

from .program_variant import Choices, ProgramVariant
from .recompute_starts import Recipe, RecomputeStarts
from .search import Search, SearchState
from .update_split import UpdateSplit, climb

#: the links are what a step waits for if ops take less than this share of it
LITTLE_COMPUTE = 0.95
#: a plan within this share of its bound leaves little to gain
NEAR_BOUND = 0.05
#: share of the host's time to give up when sides take turns; then shifts around it
FEWER, SHIFT = 0.04, 0.06
#: most plans tried with sides that take turns, and with the best share for the first gradients
MOST_TURNS, MOST_FIRST = 9, 4
#: recomputation at this multiple of the median price of memory, in the first half of forward or in
#: all of it
DEAR, LATE = 4.0, (0.5, 1.0)


def taking_turns(
    search: Search, split: UpdateSplit, states: list[SearchState]
) -> list[SearchState]:
    """Returns the best start in which sides take turns, if the links hold up the best one so far.

    It counts its plans by itself, so that the search after it is as long as without.
    """
    best = min(states, key=lambda s: s.cost, default=None)
    if best is None or not split.weights or search.settled or not _waits_for_links(search, best):
        return []
    left, share = search.left, split.share(best.variant.choices.hosted)
    sets = [*_dear_reruns(search), best.variant.choices.recomputes]
    tried = [_with(search, best, split.alternating(share - FEWER), again) for again in sets]
    found = [state for state in tried if state is not None]
    if found:
        start = min(found, key=lambda s: s.cost)
        share -= FEWER
        for sides, most in ((split.alternating, MOST_TURNS), (split.hosted, MOST_FIRST)):
            tries = _Tries(search, start, most)
            share = climb(sides, tries.cost_of, tries.is_over, share, SHIFT) or share
            found += tries.found
        first = min(found, key=lambda s: s.cost)
        state = search.evaluate(first.variant, first.cover, rounds=2)
        found += [] if state is None else [state]
    search.left = left
    found.sort(key=lambda s: s.cost)
    return found[:1]


@dataclass(eq=False)
class _Tries:
    """Plans that differ from one in their host updates, at most `most`."""

    search: Search
    start: SearchState
    most: int
    found: list[SearchState] = field(default_factory=list)

    def cost_of(self, hosted: frozenset[str]) -> float | None:
        self.most -= 1
        choices = self.start.variant.choices
        if hosted == choices.hosted:
            return self.start.us
        state = _with(self.search, self.start, hosted, choices.recomputes)
        self.found += [] if state is None else [state]
        return None if state is None else state.us

    def is_over(self) -> bool:
        return self.most <= 0 or self.search.settled


def _waits_for_links(search: Search, state: SearchState) -> bool:
    compute_us = sum(run.duration_us for run in state.variant.program.runs if not run.on_host)
    far = state.us > search.floor_us * (1 + NEAR_BOUND)
    return far and compute_us < state.us * LITTLE_COMPUTE


def _dear_reruns(search: Search) -> list[frozenset[Rerun]]:
    """Returns reruns at a high price of memory, for the first half of forward and for all of it."""
    starts = RecomputeStarts(search.problem, lambda reruns: None, lambda: False)
    prices, parts = starts.prices(), starts.parts()
    if not prices:
        return []
    return [starts.reruns(Recipe(parts[0], prices[0] * DEAR, late=late)) for late in LATE]


def _with(
    search: Search, state: SearchState, hosted: frozenset[str], reruns: frozenset[Rerun]
) -> SearchState | None:
    """Evaluates the state's direct accesses with these host updates and reruns."""
    if search.settled:
        return None
    choices = Choices(state.variant.choices.directs, reruns, hosted)
    made = ProgramVariant(search.problem, search.machine, choices, lossy=state.variant.lossy)
    cover = GapSet(made.gaps)
    if not cover.repair(made.capacity, Prices()):
        return None
    cover.prune(made.capacity, Prices())
    return search.evaluate(made, cover, rounds=1)
