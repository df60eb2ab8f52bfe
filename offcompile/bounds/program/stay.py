"""The columns that describe where one tensor is in one gap."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offcompile.bounds.highs import Ints
from offcompile.bounds.survey import SurveyGap


@dataclass(frozen=True)
class Heads:
    """The copies off the device as a gap begins, per tier: columns."""

    held: Mapping[str, int]
    kept: Mapping[str, int]  # on tiers with a limit
    born: int  # part of a new value that the host wrote
    remade: int  # part that a recomputation wrote on the host


@dataclass(frozen=True)
class StayFrame:
    """The times at which a gap is checked: its marks, which are samples, and its end."""

    gap: SurveyGap
    heads: Heads
    slots: Ints  # slots that the gap overlaps, in order of time
    window: Ints  # for each slot, the number of marks before it
    marks: Ints  # samples
    before_boundary: int  # marks before the step ends, in a gap that wraps

    @property
    def n_levels(self) -> int:
        return len(self.marks) + 1


@dataclass(frozen=True)
class GapColumns:
    """One gap. Each array has a column per mark, then one for the gap's end."""

    frame: StayFrame
    stays: int  # the part that is on the device throughout
    load: Ints  # the part that its last load has brought back
    redone: Ints | None  # the part that a recomputation has brought back
    ever: int  # 1 if the value was recomputed at all
    held: Mapping[str, Ints]  # per tier, the part carried there since the value was written
    kept: Mapping[str, Ints]  # per tier with a limit, the part that is still there

    @property
    def gap(self) -> SurveyGap:
        return self.frame.gap

    @property
    def presence(self) -> list[int]:
        """Columns that add up to the device copy at the gap's end."""
        redone = [] if self.redone is None else [int(self.redone[-1])]
        return [self.stays, int(self.load[-1]), *redone]

    def heads_of_next(self, zero: int, remade_on_host: bool) -> Heads:
        """The heads of the same value as the next gap begins."""
        return Heads(
            {t: int(c[-1]) for t, c in self.held.items()},
            {t: int(c[-1]) for t, c in self.kept.items()},
            zero,
            self.ever if remade_on_host else zero,
        )
