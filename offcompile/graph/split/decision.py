"""Decides if a graph is split along tokens, and into how many pieces.

A graph is not split if everything fits, or if its plan is no worse than one in pieces. Numbers of
pieces are compared by their floors, which need no search; at most two of them are planned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

from offcompile.graph.weight_placement import Choice
from offcompile.ir import Infeasible
from offcompile.ir.units import size
from offcompile.machine.options import Options
from offcompile.planning.fit_budget import NO_LOSS, Decided
from offcompile.planning.planner import NO_RIVAL, Beaten, Rival, device_us
from offcompile.planning.splitting import SplitPart, Splitting, StepEstimate, subject_of

#: numbers of pieces to try, in turn
LADDER = (4, 8, 16, 32)
#: a budget has room to spare if it is above a floor by this factor, and so much that more pieces
#: are not even estimated, which takes seconds, if it is above by the second
ROOM_TO_SPARE, MUCH_ROOM = 1.25, 4
#: more pieces are not worth their launches unless they lower the floor to this share
LOWER = 0.95
#: if a plan already exists, only tensors of at least this share of the budget are split
WORTH_SPLITTING = 1 / 8
#: a plan with a step below this multiple of what only the device can run cannot gain from a split
NEARLY_FREE = 1.03
#: if a plan's gap to its bound is below CLOSE, more pieces are not tried; below NEAR, only if they
#: lower the bound to this share
CLOSE, NEAR, LOWER_BOUND = 0.05, 0.1, 0.98

T = TypeVar("T")


@dataclass(frozen=True)
class Ways(Generic[T]):
    """The ways to plan one graph. `whole` and `in_pieces` raise `Infeasible`, and `Beaten` if no
    plan can beat the rival, their last argument; the one before says if a refusal should name a
    budget that has a plan."""

    options: Options
    #: bytes of the device; None to plan for the floor
    budget: int | None
    whole: Callable[[bool, Rival], T]
    in_pieces: Callable[[int, bool, Rival], T]
    #: estimates the step in so many pieces; None: whole
    estimate: Callable[[int | None], StepEstimate]
    #: describes what so many pieces split
    parts: Callable[[int], tuple[SplitPart, ...]]
    #: 0 if there is nothing to split
    most_pieces: Callable[[], int]
    #: bytes of the largest tensor that a split removes
    largest_bytes: Callable[[], int]
    choice: Callable[[T], Choice]
    #: searches on from a plan that a trial found
    searched_on: Callable[[T], T]
    #: False if a refusal is for nobody to read
    explains: bool = True

    def best(self) -> tuple[T, Splitting | None]:
        """The best plan, and how it splits the graph; None if the graph stays whole. Raises
        `Infeasible`."""
        asked = self.options.pieces
        if asked is not None and self.most_pieces() > 1:
            pieces = min(asked, self.most_pieces())
            return self.in_pieces(pieces, True, NO_RIVAL), self.splitting(pieces)
        if not self.options.may_split:
            try:
                return self.whole(True, NO_RIVAL), None
            except Infeasible as error:
                raise self._with_advice(error) from None
        found, number = self._best()
        return found, None if number is None else self.splitting(number)

    def _best(self) -> tuple[T, int | None]:
        """The best plan, and the number of its pieces."""
        limit = self._nearly_free
        try:
            whole = self.whole(False, limit)
        except Infeasible:
            return self._only_in_pieces()
        except Beaten:
            return self._pieces_first()
        if limit.limits_bounds and self._is_free_but_for_updates(self.choice(whole)):
            # within that limit not all places of weights were compared, and the host's updates may
            # save more than the limit leaves
            with contextlib.suppress(Infeasible):
                other = self._pieces_first()
                if self._beats(self.choice(other[0]).decided, self.choice(whole).decided):
                    return other
            return whole, None
        if self._may_gain(self.choice(whole)):
            found = self._best_in_pieces(self.choice(whole))
            if found is not None:
                return found
        return whole, None

    def splitting(self, pieces: int) -> Splitting:
        return Splitting(pieces, self.parts(pieces), self.estimate(None), self.estimate(pieces))

    @property
    def _nearly_free(self) -> Rival:
        """Only a nearly free plan of the whole graph is worth a search before one in pieces."""
        if self.budget is None or not self._counts or not self._may_relieve:
            return NO_RIVAL
        return Rival(of_ops=NEARLY_FREE)

    def _pieces_first(self) -> tuple[T, int | None]:
        """The best plan, where the whole graph has none that is nearly free: the whole is only
        searched as long as it may beat the pieces. Trials are compared, and the best goes on."""
        found = self._best_in_pieces(None)
        if found is None:
            try:
                return self.whole(False, NO_RIVAL), None
            except Infeasible:
                return self._refused()
        best = self.choice(found[0])
        rival = _rival_of(best, best.decided.cost_us / (1 - NO_LOSS))
        with contextlib.suppress(Infeasible, Beaten):
            return self.searched_on(self.whole(False, replace(rival, by_trials=True))), None
        return self.searched_on(found[0]), found[1]

    def _only_in_pieces(self) -> tuple[T, int | None]:
        """The best plan in pieces, where the graph as a whole has none."""
        found = self._best_in_pieces(None)
        return self._refused() if found is None else (self.searched_on(found[0]), found[1])

    def _refused(self) -> tuple[T, int | None]:
        """Raises the refusal, where neither the whole graph nor any number of pieces tried has a
        plan; returns a plan if explaining the refusal finds one after all."""
        if not self._counts:
            return self.whole(True, NO_RIVAL), None
        pieces = self._least
        try:
            return self.in_pieces(pieces, True, NO_RIVAL), pieces
        except Infeasible as error:
            reason = error.reason[:1].lower() + error.reason[1:]
            reason = f"Even with {self._subject(pieces)} in {pieces} pieces, {reason}"
            raise Infeasible(reason, error.needed_bytes, error.smallest_change) from None

    def _may_gain(self, whole: Choice) -> bool:
        if self.budget is None:
            return self.most_pieces() > 1
        if whole.decided.fits or self._is_nearly_free(whole):
            return False
        return self._may_relieve

    @property
    def _may_relieve(self) -> bool:
        """True if a split removes a tensor that is large for the budget."""
        assert self.budget is not None
        return self.largest_bytes() >= self.budget * WORTH_SPLITTING

    # --- in pieces --------------------------------------------------------------------------

    @cached_property
    def _counts(self) -> tuple[int, ...]:
        most = self.most_pieces()
        return tuple(pieces for pieces in LADDER if pieces <= most)

    @cached_property
    def _least(self) -> int:
        """The fewest pieces that come close to the lowest floor."""
        floors = {n: self.estimate(n).floor_bytes for n in self._counts}
        lowest = min(floors.values())
        return next(n for n in self._counts if floors[n] * LOWER <= lowest)

    @cached_property
    def _first(self) -> int:
        """The fewest pieces with room to spare, or else those with the lowest floor."""
        if self.budget is not None:
            for pieces in self._counts:
                if self.estimate(pieces).floor_bytes * ROOM_TO_SPARE <= self.budget:
                    return pieces
        return self._least

    def _tried(self) -> Iterator[int]:
        """The numbers of pieces to plan: the first, then the next if its floor is notably lower."""
        yield self._first
        more = next((n for n in self._counts if n > self._first), None)
        floor = self.estimate(self._first).floor_bytes
        if more is None or (self.budget is not None and floor * MUCH_ROOM <= self.budget):
            return
        if self.estimate(more).floor_bytes <= LOWER * floor:
            yield more

    def _best_in_pieces(self, whole: Choice | None) -> tuple[T, int] | None:
        """The best plan in pieces, if it beats the whole graph's plan. Without one, the best trial,
        which is to be searched on."""
        if not self._counts:
            return None
        best: tuple[T, int] | None = None
        beaten, fewer = whole, None
        for pieces in self._tried():
            try:
                rival = replace(self._rival(beaten, fewer), by_trials=whole is None)
                found = self.in_pieces(pieces, False, rival)
            except (Infeasible, Beaten):
                continue
            made = self.choice(found)
            fewer = made
            if beaten is None or self._beats(made.decided, beaten.decided):
                best, beaten = (found, pieces), made
            if made.decided.fits or self._is_nearly_free(made) or made.decided.result.gap < CLOSE:
                break
        return best

    def _rival(self, whole: Choice | None, fewer: Choice | None) -> Rival:
        """The plans that one in more pieces has to beat. If the plan in fewer pieces is near its
        bound, more room gains little unless it lowers that bound."""
        known = [made for made in (whole, fewer) if made is not None]
        if not known or self.budget is None:  # the lowest peak is sought, not the fastest step
            return NO_RIVAL
        best = min(known, key=lambda made: made.decided.cost_us)
        rival = _rival_of(best, best.decided.cost_us * (1 - NO_LOSS))
        if fewer is None or fewer.decided.result.gap > NEAR:
            return rival
        return replace(rival, bound_us=fewer.decided.result.lower_bound_us * LOWER_BOUND)

    def _is_nearly_free(self, choice: Choice) -> bool:
        least_us = device_us(choice.annotated.problem)
        return self.budget is not None and choice.decided.cost_us <= least_us * NEARLY_FREE

    def _is_free_but_for_updates(self, choice: Choice) -> bool:
        ops_us = sum(op.duration_us for op in choice.annotated.problem.ops)
        is_near = choice.decided.cost_us <= ops_us * NEARLY_FREE
        return is_near and not choice.decided.fits and not self._is_nearly_free(choice)

    def _beats(self, one: Decided, other: Decided) -> bool:
        faster = one.cost_us < other.cost_us * (1 - NO_LOSS)
        if self.budget is not None:
            return faster
        mine, theirs = one.order.peak_bytes, other.order.peak_bytes
        return mine < theirs or (mine == theirs and faster)

    # --- in words ---------------------------------------------------------------------------

    def _subject(self, pieces: int) -> str:
        return subject_of(self.parts(pieces))

    def _with_advice(self, error: Infeasible) -> Infeasible:
        """The error, with advice to split if a plan in pieces would fit."""
        if not self.explains or self.budget is None or not self._counts:
            return error
        pieces = self._first
        floor = self.estimate(pieces).floor_bytes
        if floor * ROOM_TO_SPARE > self.budget:
            try:
                self.in_pieces(pieces, False, NO_RIVAL)
            except Infeasible:
                return error
        change = (
            f"{error.smallest_change} Or set split=True: with {self._subject(pieces)} in"
            f" {pieces} pieces the step fits. Its floor is then {size(floor)} instead of"
            f" {size(self.estimate(None).floor_bytes)}, and its sums differ in the last bits."
        )
        return Infeasible(error.reason, error.needed_bytes, change)


def _rival_of(choice: Choice, cost_us: float) -> Rival:
    return Rival(cost_us, plan=choice.decided.result.plan, stays=choice.stays)
