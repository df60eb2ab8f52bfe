"""Decides if a loss is split along tokens, and into how many pieces.

A graph is not split if everything fits, or if its plan is no worse than one in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from offcompile.graph.weight_placement import Choice
from offcompile.ir import Infeasible
from offcompile.machine.options import Options
from offcompile.planning.fit_budget import NO_LOSS, Decided

#: numbers of pieces to try, in turn
LADDER = (4, 8, 16, 32)
#: if a plan already exists, only tensors of at least this share of the budget are split
WORTH_SPLITTING = 1 / 8
#: a plan with a step below this multiple of its ops' time cannot gain from a split
NEARLY_FREE = 1.02

T = TypeVar("T")


@dataclass(frozen=True)
class Ways(Generic[T]):
    """The ways to plan one graph. `whole` and `in_pieces` raise `Infeasible`."""

    options: Options
    #: bytes of the device; None to plan for the floor
    budget: int | None
    whole: Callable[[], T]
    in_pieces: Callable[[int], T]
    #: 0 if there is nothing to split
    most_pieces: Callable[[], int]
    #: bytes of the largest tensor that a split removes
    largest_bytes: Callable[[], int]
    choice: Callable[[T], Choice]

    def best(self) -> tuple[T, int | None]:
        """The best plan, and its number of pieces; None if the graph stays whole."""
        asked = self.options.pieces
        if asked is not None and self.most_pieces() > 1:
            pieces = min(asked, self.most_pieces())
            return self.in_pieces(pieces), pieces
        try:
            whole = self.whole()
        except Infeasible as error:
            if not self.options.may_split:
                raise self._with_advice(error) from None
            found = self._best_in_pieces(None)
            if found is None:
                raise
            return found
        if self.options.may_split and self._may_gain(self.choice(whole)):
            found = self._best_in_pieces(self.choice(whole).decided)
            if found is not None:
                return found
        return whole, None

    def _may_gain(self, whole: Choice) -> bool:
        if self.budget is None:
            return self.most_pieces() > 1
        compute_us = sum(op.duration_us for op in whole.annotated.problem.ops)
        if whole.decided.fits or whole.decided.cost_us <= compute_us * NEARLY_FREE:
            return False
        return self.largest_bytes() >= self.budget * WORTH_SPLITTING

    def _best_in_pieces(self, whole: Decided | None) -> tuple[T, int] | None:
        """The best plan in pieces, if it beats the whole graph's plan."""
        best: tuple[T, int] | None = None
        beaten = whole
        for pieces in self._ladder():
            try:
                found = self.in_pieces(pieces)
            except Infeasible:
                continue
            decided = self.choice(found).decided
            if beaten is None or self._beats(decided, beaten):
                best, beaten = (found, pieces), decided
            elif best is not None:
                break
            if decided.fits:
                break
        return best

    def _ladder(self) -> Iterator[int]:
        most = self.most_pieces()
        yield from (pieces for pieces in LADDER if pieces <= most)

    def _beats(self, one: Decided, other: Decided) -> bool:
        faster = one.cost_us < other.cost_us * (1 - NO_LOSS)
        if self.budget is not None:
            return faster
        mine, theirs = one.order.peak_bytes, other.order.peak_bytes
        return mine < theirs or (mine == theirs and faster)

    def _with_advice(self, error: Infeasible) -> Infeasible:
        """The error, with advice to split if a plan in pieces would fit."""
        if self.budget is None:
            return error
        for pieces in self._ladder():
            try:
                self.in_pieces(pieces)
            except Infeasible:
                continue
            change = (
                f"{error.smallest_change} Or set split=True: the loss in {pieces} pieces fits, and"
                " its sums differ in the last bits."
            )
            return Infeasible(error.reason, error.needed_bytes, change)
        return error
