"""Notes when ranks reduce buckets of gradients, so that measured steps can show them beside copies.

In: a bucket that is sent, and the moment at which this rank sees that it is back. Out: those that
were under way during a run of a compiled half.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from offcompile.runtime.base.once import made_once

#: the lane of reductions in measured steps
REDUCTION = "reduction"
#: number of reductions that are remembered
MOST_KEPT = 1024


@dataclass(eq=False, slots=True)
class SentBucket:
    """A bucket on its way: its number in the order of sending, and instants of the wall clock."""

    number: int
    nbytes: int
    began: int = field(default_factory=time.perf_counter_ns)
    #: when this rank saw that it was back; None: not yet
    ended: int | None = None

    @property
    def name(self) -> str:
        return f"bucket {self.number}"

    def is_back(self) -> None:
        self.ended = time.perf_counter_ns()


def sent(number: int, nbytes: int) -> SentBucket:
    """Note a bucket that is sent now."""
    found = SentBucket(number, nbytes)
    _newest().append(found)
    return found


def since(began: int) -> list[SentBucket]:
    """Return the reductions that were under way at this instant or later, the oldest first."""
    return [one for one in tuple(_newest()) if one.ended is None or one.ended > began]


def _newest() -> deque[SentBucket]:
    return made_once("newest reductions of gradients", None, partial(deque, maxlen=MOST_KEPT))
