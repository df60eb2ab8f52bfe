"""Makes the plans that a search starts from: of every kind, and from the best of each the next.

First come plans that only move tensors. Then come choices that other searches found, other splits
of the updates, and recomputation from nearly free ops to whole blocks. Last come variants of the
best, with loads made direct or replaced by recomputation.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from offcompile.ir import DEVICE, HOST, Plan
from offcompile.passes.build.gaps import Gap
from offcompile.passes.select.gap_set import GapSet, Prices
from offcompile.passes.select.rematerialization import Rematerialization, Rerun

from .balance import balanced
from .program_variant import Choices, ProgramVariant, hostable
from .recompute_fit import reruns_beside_moves
from .recompute_starts import WORTH_ANOTHER, RecomputeStarts
from .rerun_loads import rerun_variants
from .search import Search, SearchState, choices_of
from .update_split import UpdateSplit

#: share of the time that the first covers may take
START_SHARE = 0.3
#: share of the time for starts with recomputation, and how many of them are refined
RECOMPUTE_SHARE, REFINED_STARTS = 0.6, 3
#: share of all evaluations for starts with recomputation: without and with choices known from other
#: searches
NEW_SHARE, KNOWN_SHARE = 0.6, 0.4
#: share of the host's time taken off the updates in the second split tried with recomputation
FEWER_HOSTED = 0.12
#: starts within this factor of the best are varied, up to this many
NEAR, VARIED = 1.25, 2
#: number of best starts that try recomputation in place of loads
RERUN_STARTS = 3
#: weight of a gap in which a relaxation evicts nothing
UNHINTED = 0.05

#: a tensor, and the run before a gap of it
GapKey = tuple[str, str | None]
#: the part of the tensor that should leave the device in the gap
Hints = Mapping[GapKey, float]
_NO_HINTS: Hints = {}


@dataclass(frozen=True)
class OutlinedChoices:
    """Rounded choices of an outline of the step, and the time that it promises. away: what had
    better leave."""

    choices: Choices
    cost_us: float
    away: Hints = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Starts:
    """Makes starts of one search.

    forced: what no plan can do without. hints: those of a relaxation. is_outlined: outlines have
    been tried. known_choices: those of plans for the same step with its weights elsewhere.
    """

    search: Search
    forced: Choices
    longest_seconds: float
    lossy: bool = False
    hints: Hints = field(default_factory=dict)
    known_choices: tuple[Choices, ...] = ()
    is_outlined: bool = False

    def moving(self, variant: ProgramVariant, headrooms: tuple[float, ...]) -> list[SearchState]:
        """Starts that move tensors, with more or less memory left free."""
        search, found = self.search, list[SearchState]()
        deadline = time.thread_time() + START_SHARE * self.longest_seconds
        tiers = [HOST, *(t.name for t in search.machine.tiers if t.name not in (DEVICE, HOST))]
        for tier in tiers if search.best_plan is None else tiers[:1]:
            here = variant if tier == variant.tier else self.variant(variant.choices, tier)
            covers: set[frozenset[int]] = set()
            largest = 2 * max((g.tensor.nbytes for g in here.gaps.gaps), default=0)
            for headroom in headrooms:
                for hints in (_NO_HINTS, self.hints) if self.hints else (_NO_HINTS,):
                    if search.settled or (found and time.thread_time() > deadline):
                        return found
                    cover = self._cover(here, headroom, hints, UNHINTED if hints else 1.0)
                    if cover is None or frozenset(cover.away) in covers:
                        continue
                    covers.add(frozenset(cover.away))
                    state = search.evaluate(here, cover, rounds=2, reserve=headroom * largest)
                    found += [] if state is None else [state]
        return found

    def outlined(
        self, outlines: Iterable[OutlinedChoices], near: float, promised_us: float = 0.0
    ) -> tuple[list[SearchState], float]:
        """Starts with the choices of outlines, until one takes at most `near` times as long as the
        first promises; and the time that it promises. promised_us: that of one tried before."""
        found, before = list[SearchState](), list[Choices]()
        for outline in outlines:
            promised_us = promised_us or outline.cost_us
            hints = [outline.away, *([] if outline.choices in before else [_NO_HINTS])]
            before.append(outline.choices)
            for away in hints:
                state = self._tried(outline.choices, away)
                found += [] if state is None else [state]
                if self.search.settled or self.search.best_us <= promised_us * near:
                    return found, promised_us
        return found, promised_us

    def known(self) -> list[SearchState]:
        """Starts that reuse recomputations and host updates of plans for the same ops."""
        found: list[SearchState] = []
        may_host = frozenset(hostable(self.search.problem)) if self.known_choices else frozenset()
        for known in self.known_choices:
            if self.search.settled:
                break
            hosted = (known.hosted & may_host) | self.forced.hosted
            state = self._tried(Choices(self.forced.directs, known.recomputes, hosted))
            found += [] if state is None else [state]
        return found

    def splitting(
        self, split: UpdateSplit, states: list[SearchState], share: float
    ) -> list[SearchState]:
        """The best start, with the updates split over host and device in another way."""
        search, base, found = self.search, self._base(states), list[SearchState]()
        deadline = time.thread_time() + share * self.longest_seconds
        least = search.left - int(share * search.left)

        def cost_of(hosted: frozenset[str]) -> float | None:
            choices = Choices(base.directs, base.recomputes, hosted | self.forced.hosted)
            state = self._tried(choices)
            if state is None:
                return None
            found.append(state)
            return state.us

        def is_over() -> bool:
            return search.settled or search.left <= least or time.thread_time() > deadline

        around = split.share(base.hosted) if base.recomputes or base.hosted - split.held else None
        split.search(cost_of, is_over, around)
        found.sort(key=lambda s: s.cost)
        return found[:1]

    def recomputing(self, states: list[SearchState], split: UpdateSplit) -> list[SearchState]:
        """Starts with recomputation, from nearly free ops to whole blocks.

        If updates are split, each start is also tried with fewer of them on the host: the link time
        that recomputation saves shows only if the step does not wait for the host.
        """
        search, base, found = self.search, self._base(states), list[SearchState]()
        hosts = [base.hosted]
        if split.weights:
            fewer = split.hosted(split.share(base.hosted) - FEWER_HOSTED) | self.forced.hosted
            hosts += [fewer] if fewer != base.hosted else []
        deadline = time.thread_time() + RECOMPUTE_SHARE * self.longest_seconds
        # little is left to find if there are good choices already
        share = KNOWN_SHARE if self.known_choices or self.is_outlined else NEW_SHARE
        least = search.left - int(share * search.left)

        def cost_of(reruns: frozenset[Rerun]) -> float | None:
            costs: list[float] = []
            for hosted in hosts:
                if costs and (is_over() or costs[0] > search.best_us * NEAR):
                    break
                state = self._tried(Choices(base.directs, reruns, hosted))
                if state is not None:
                    found.append(state)
                    costs.append(state.us)
            return min(costs, default=None)

        def is_over() -> bool:
            return search.settled or search.left <= least or time.thread_time() > deadline

        for reruns in reruns_beside_moves(search.problem, search.machine):
            if is_over():
                break
            cost_of(reruns)
        RecomputeStarts(search.problem, cost_of, is_over).run()
        found.sort(key=lambda s: s.cost)
        return [
            again
            for state in found[:REFINED_STARTS]
            if (again := search.evaluate(state.variant, state.cover, rounds=2)) is not None
        ]

    def balanced(self, states: list[SearchState]) -> list[SearchState]:
        """Variants of the best start with loads made direct, if the lane limits it."""
        found: list[SearchState] = []
        best = min(states, key=lambda s: s.cost, default=None)
        while best is not None and not self.search.done:
            made = balanced(best)
            state = made and self.search.evaluate(*made, rounds=2, reserve=best.reserve)
            if state is None or state.us >= best.us:
                break
            found.append(state)
            best = state
        return found

    def rerunning(self, states: list[SearchState]) -> list[SearchState]:
        """The best starts with loads replaced by recomputation, as long as that helps."""
        search, remat = self.search, Rematerialization(self.search.problem)
        found: list[SearchState] = []
        for start in sorted(states, key=lambda s: s.cost)[:RERUN_STARTS]:
            best: SearchState | None = start
            while best is not None and not search.done:
                made = (
                    search.evaluate(variant, cover, rounds=1)
                    for variant, cover in rerun_variants(best, remat)
                    if not search.done
                )
                better = [s for s in made if s is not None and s.us < best.us * (1 - WORTH_ANOTHER)]
                best = min(better, key=lambda s: s.cost, default=None)
                found += [] if best is None else [best]
        return found

    def worth_varying(self, states: list[SearchState]) -> list[ProgramVariant]:
        """The variants of starts close to the best one, each once, best first."""
        near_us = self.search.best_us * NEAR
        near = [s for s in sorted(states, key=lambda s: s.cost) if s.us <= near_us]
        variants = {s.variant.choices: s.variant for s in reversed(near)}
        return list(reversed(variants.values()))[:VARIED]

    def state_of(self, plan: Plan) -> SearchState | None:
        """Convert a plan of another policy into a state of this search."""
        variant = self.variant(choices_of(plan))
        away = {(d.tensor, d.after) for d in plan.drops if d.tier == DEVICE}
        return self.search.evaluate(variant, variant.cover(away), rounds=2)

    def variant(self, choices: Choices, tier: str = HOST) -> ProgramVariant:
        return ProgramVariant(self.search.problem, self.search.machine, choices, tier, self.lossy)

    def _base(self, states: list[SearchState]) -> Choices:
        best = min(states, key=lambda s: s.cost, default=None)
        return self.forced if best is None else best.variant.choices

    def _tried(self, choices: Choices, away: Hints = _NO_HINTS) -> SearchState | None:
        """A quick plan with these choices, which evicts rather in the gaps of `away`."""
        variant = self.variant(choices)
        cover = self._cover(variant, 0.0, away)
        return None if cover is None else self.search.evaluate(variant, cover, rounds=1)

    def _cover(
        self,
        variant: ProgramVariant,
        headroom: float,
        hints: Hints = _NO_HINTS,
        unhinted: float = 1.0,
    ) -> GapSet | None:
        """Gaps to spend off the device so that the step fits; None if it does not.

        unhinted: weight of a gap without a hint.
        """
        cover, prices = GapSet(variant.gaps), Prices()
        spare = headroom * max((g.tensor.nbytes for g in variant.gaps.gaps), default=0) * 2

        def weight(gap: Gap) -> float:
            return unhinted + hints.get((gap.tensor.id, gap.after), 0.0)

        cover.repair(variant.capacity - spare, prices, weight)
        if not cover.repair(variant.capacity, prices, weight):
            return None
        cover.prune(variant.capacity - spare, prices)
        return cover
