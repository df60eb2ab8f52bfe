"""The choices at one crowded moment of a step, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

from .ending import Ending
from .sides import Sides
from .survey import Floats


@dataclass(frozen=True)
class Cut:
    """The choices at one moment; times in nanoseconds, a column for each lane, compute first and
    the host's updates last.

    No way at all is infinite.
    """

    #: those that may be away
    tensors: tuple[str, ...]
    #: bytes that have to go at least
    excess: float
    nbytes: Floats
    #: carrying out, before; coming back, after; computing again, after
    out: Floats
    back: Floats
    again: Floats
    #: loads that come before whatever is away then
    first: Floats
    #: of the compute lane before and after
    compute: tuple[float, float]
    #: updates that may be the host's
    sides: Sides
    #: what is made later and lasts
    ending: Ending
