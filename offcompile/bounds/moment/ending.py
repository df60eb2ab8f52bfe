"""Memory at the end of a step: lasting results of later ops are on the device, or have left."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from offcompile.bounds.survey import Floats

from .ways import Serving


@dataclass(frozen=True)
class Ending:
    """Results made after the moment, each with a row of ways out.

    excess: bytes of results for which the device has no room when the step ends.
    """

    nbytes: Floats
    out: Serving
    excess: float

    def busy(self, after: Floats) -> Floats:
        """Time that each lane is busy after the moment, when the cheapest results leave."""
        if self.excess <= 0 or not len(self.nbytes):
            return np.zeros(len(after))
        prices = self.out.prices(after)
        ways = prices.argmin(axis=1)
        price = prices[np.arange(len(ways)), ways]
        order = np.argsort(price / self.nbytes, kind="stable")
        order = order[np.isfinite(price[order])]
        sizes = self.nbytes[order]
        share = np.zeros(len(ways))
        share[order] = np.clip((self.excess - (np.cumsum(sizes) - sizes)) / sizes, 0.0, 1.0)
        return self.out.busy(ways, share)
