"""Room at the end of a step: what is made after a moment and lasts stands there, or has left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .survey import Floats, known, priced


@dataclass(frozen=True)
class Ending:
    """Results made after the moment; a row of ways out for each, none of which is infinite.

    excess: bytes of them for which the device has no room when the step ends.
    """

    nbytes: Floats
    out: Floats
    excess: float

    def busy(self, after: Floats) -> Floats:
        """How busy lanes are after the moment, where those that leave are cheapest to send out."""
        busy = np.zeros(len(after))
        if self.excess <= 0 or not len(self.nbytes):
            return busy
        prices = priced(self.out, after)
        ways = prices.argmin(axis=1)
        price = prices[np.arange(len(ways)), ways]
        order = np.argsort(price / self.nbytes, kind="stable")
        order = order[np.isfinite(price[order])]
        sizes = self.nbytes[order]
        share = np.clip((self.excess - (np.cumsum(sizes) - sizes)) / sizes, 0.0, 1.0)
        np.add.at(busy, ways[order], share * known(self.out[order, ways[order]]))
        return busy
