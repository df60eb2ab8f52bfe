"""The part of a shared link that each lane and each access of host memory takes."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from fractions import Fraction

from offcompile.ir import Lane, SharedLink
from offcompile.ir.units import exact

#: full speed of a move, and the whole rate of a link
FULL = 1_000_000


@dataclass(frozen=True, slots=True)
class LinkFigures:
    """A shared link with its lanes as numbers."""

    link: SharedLink
    #: millionths of the link's rate that a move over each lane takes at full speed; 0: it is not
    #: on this link
    lane_shares: tuple[int, ...]

    @classmethod
    def of(cls, link: SharedLink, lanes: Sequence[Lane]) -> LinkFigures:
        # even a lane far faster than its link moves on while nothing else uses the link
        most = FULL * FULL // max(1, len(link.lanes))
        rate = exact(link.bytes_per_us)
        return cls(
            link,
            tuple(
                min(most, math.ceil(FULL * exact(lane.bytes_per_us) / rate))
                if lane.name in link.lanes
                else 0
                for lane in lanes
            ),
        )

    def accesses_ns(
        self, read: Collection[int], written: Collection[int], nbytes: Sequence[int], update: bool
    ) -> Fraction:
        """The time that the link takes for these accesses in place of an op or a host update."""
        link, total = self.link, 0
        if link.updates if update else link.in_place_reads:
            total += sum(nbytes[t] for t in read)
        if link.updates if update else link.in_place_writes:
            total += sum(nbytes[t] for t in written)
        return total * 1000 / exact(self.link.bytes_per_us)


def shares_of_run(duration_ns: int, accesses_ns: Sequence[Fraction]) -> tuple[int, ...]:
    """The millionths of each link that a run takes; none if it accesses nothing in place.

    An op that is shorter than a link takes for whole operands does not read all of them.
    """
    if not duration_ns or not any(accesses_ns):
        return ()
    return tuple(min(FULL, math.ceil(FULL * ns / duration_ns)) for ns in accesses_ns)
