"""Memory at the end of a step: lasting results of later ops are on the device, or have left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offcompile.bounds.survey import Floats, known, priced


@dataclass(frozen=True)
class Ending:
    """Results made after the moment, each with a row of ways out; infinite where there is none.

    excess: bytes of results for which the device has no room when the step ends.
    """

    nbytes: Floats
    out: Floats
    excess: float

    def busy(self, after: Floats) -> Floats:
        """Time that each lane is busy after the moment, when the cheapest results leave."""
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
