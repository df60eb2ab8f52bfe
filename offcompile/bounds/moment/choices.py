"""The choices at one crowded moment of a step, as arrays."""

from __future__ import annotations

from dataclasses import dataclass

from offcompile.bounds.survey import Floats

from .ending import Ending
from .sides import Sides
from .ways import Serving


@dataclass(frozen=True)
class Cut:
    """The choices at one moment; times in nanoseconds, one column per lane: compute first, host
    updates last.

    A time is infinite where there is no way at all.
    """

    #: tensors that may be away
    tensors: tuple[str, ...]
    #: minimum of bytes that have to be away
    excess: float
    nbytes: Floats
    #: times to carry out before, to bring back after, and to recompute after the moment
    out: Serving
    back: Serving
    again: Floats
    #: loads before the moment that every choice needs
    first: Serving
    #: busy time of the compute lane before and after
    compute: tuple[float, float]
    #: updates that may run on the host
    sides: Sides
    #: lasting results that are made later
    ending: Ending
