"""Decides if a graph is split along tokens, and into how many pieces.

A graph is not split if everything fits, or if its plan is no worse than one in pieces. Numbers of
pieces are compared by their floors, which need no search; at most two of them are planned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Generic, TypeVar

from offcompile.graph.weight_placement import Choice
from offcompile.ir import Infeasible
from offcompile.ir.units import size
from offcompile.machine.options import Options
from offcompile.planning.fit_budget import NO_LOSS, Decided
from offcompile.planning.splitting import SplitPart, Splitting, StepEstimate, subject_of

#: numbers of pieces to try, in turn
LADDER = (4, 8, 16, 32)
#: a budget has room to spare if it is above a floor by this factor
ROOM_TO_SPARE = 1.25
#: more pieces are not worth their launches unless they lower the floor to this share
LOWER = 0.95
#: if a plan already exists, only tensors of at least this share of the budget are split
WORTH_SPLITTING = 1 / 8
#: a plan with a step below this multiple of its ops' time cannot gain from a split
NEARLY_FREE = 1.02

T = TypeVar("T")


@dataclass(frozen=True)
class Ways(Generic[T]):
    """The ways to plan one graph. `whole` and `in_pieces` raise `Infeasible`; their last argument
    says if a refusal should name a budget that has a plan."""

    options: Options
    #: bytes of the device; None to plan for the floor
    budget: int | None
    whole: Callable[[bool], T]
    in_pieces: Callable[[int, bool], T]
    #: estimates the step in so many pieces; None: whole
    estimate: Callable[[int | None], StepEstimate]
    #: describes what so many pieces split
    parts: Callable[[int], tuple[SplitPart, ...]]
    #: 0 if there is nothing to split
    most_pieces: Callable[[], int]
    #: bytes of the largest tensor that a split removes
    largest_bytes: Callable[[], int]
    choice: Callable[[T], Choice]

    def best(self) -> tuple[T, Splitting | None]:
        """The best plan, and how it splits the graph; None if the graph stays whole. Raises
        `Infeasible`."""
        asked = self.options.pieces
        if asked is not None and self.most_pieces() > 1:
            pieces = min(asked, self.most_pieces())
            return self.in_pieces(pieces, True), self.splitting(pieces)
        try:
            whole = self.whole(not self.options.may_split)
        except Infeasible as error:
            if not self.options.may_split:
                raise self._with_advice(error) from None
            return self._only_in_pieces()
        if self.options.may_split and self._may_gain(self.choice(whole)):
            found = self._best_in_pieces(self.choice(whole).decided)
            if found is not None:
                return found[0], self.splitting(found[1])
        return whole, None

    def splitting(self, pieces: int) -> Splitting:
        return Splitting(pieces, self.parts(pieces), self.estimate(None), self.estimate(pieces))

    def _only_in_pieces(self) -> tuple[T, Splitting | None]:
        """The best plan in pieces, where the graph as a whole has none."""
        if not self._counts:
            return self.whole(True), None
        found = self._best_in_pieces(None)
        if found is not None:
            return found[0], self.splitting(found[1])
        pieces = self._least
        try:
            return self.in_pieces(pieces, True), self.splitting(pieces)
        except Infeasible as error:
            reason = error.reason[:1].lower() + error.reason[1:]
            reason = f"Even with {self._subject(pieces)} in {pieces} pieces, {reason}"
            raise Infeasible(reason, error.needed_bytes, error.smallest_change) from None

    def _may_gain(self, whole: Choice) -> bool:
        if self.budget is None:
            return self.most_pieces() > 1
        compute_us = sum(op.duration_us for op in whole.annotated.problem.ops)
        if whole.decided.fits or whole.decided.cost_us <= compute_us * NEARLY_FREE:
            return False
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

    def _after(self, pieces: int) -> int | None:
        """The next number of pieces with a notably lower floor; None if there is none."""
        floor = self.estimate(pieces).floor_bytes
        more = (n for n in self._counts if n > pieces)
        return next((n for n in more if self.estimate(n).floor_bytes <= LOWER * floor), None)

    def _best_in_pieces(self, whole: Decided | None) -> tuple[T, int] | None:
        """The best plan in pieces, if it beats the whole graph's plan."""
        if not self._counts:
            return None
        best: tuple[T, int] | None = None
        beaten = whole
        for pieces in (self._first, self._after(self._first)):
            if pieces is None:
                break
            try:
                found = self.in_pieces(pieces, False)
            except Infeasible:
                continue
            made = self.choice(found)
            if beaten is None or self._beats(made.decided, beaten):
                best, beaten = (found, pieces), made.decided
            if made.decided.fits or self._is_nearly_free(made):
                break
        return best

    def _is_nearly_free(self, choice: Choice) -> bool:
        compute_us = sum(op.duration_us for op in choice.annotated.problem.ops)
        return self.budget is not None and choice.decided.cost_us <= compute_us * NEARLY_FREE

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
        if self.budget is None or not self._counts:
            return error
        pieces = self._first
        floor = self.estimate(pieces).floor_bytes
        if floor * ROOM_TO_SPARE > self.budget:
            try:
                self.in_pieces(pieces, False)
            except Infeasible:
                return error
        change = (
            f"{error.smallest_change} Or set split=True: with {self._subject(pieces)} in"
            f" {pieces} pieces the step fits. Its floor is then {size(floor)} instead of"
            f" {size(self.estimate(None).floor_bytes)}, and its sums differ in the last bits."
        )
        return Infeasible(error.reason, error.needed_bytes, change)
