"""Ways to serve tensors, each on one lane, except access in place: it takes a link as well."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from offcompile.bounds.survey import Floats, known, priced

Ints = npt.NDArray[np.intp]

#: the column of the compute lane, where access in place takes its time
IN_PLACE = 0


@dataclass(frozen=True, eq=False)
class Serving:
    """One column per lane, the compute lane first; one row per tensor, or none for one tensor.

    A time is infinite where there is no way at all. `beside`: the time in which access in place
    also keeps each lane from moving.
    """

    times: Floats
    beside: Floats

    @classmethod
    def stack(cls, rows: Sequence[Serving], width: int) -> Serving:
        shape = (-1, width)
        times, beside = [w.times for w in rows], [w.beside for w in rows]
        return cls(np.array(times).reshape(shape), np.array(beside).reshape(shape))

    def and_rows(self, more: Sequence[Serving]) -> Serving:
        """The same with more rows, each of one tensor."""
        added = Serving.stack(more, self.times.shape[1])
        times = np.concatenate((self.times, added.times))
        return Serving(times, np.concatenate((self.beside, added.beside)))

    def __len__(self) -> int:
        return len(self.times)

    def of(self, row: int) -> Serving:
        return Serving(self.times[row], self.beside[row])

    def key(self, row: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Equal for tensors that are served alike."""
        return tuple(self.times[row]), tuple(self.beside[row])

    def prices(self, weights: Floats) -> Floats:
        """The cost of each way, given the weights of the lanes; infinite where there is none."""
        prices = priced(self.times, weights)
        if self.beside.any():
            prices[..., IN_PLACE] += self.beside @ weights
        return prices

    def busy(self, picked: Ints, share: Floats) -> Floats:
        """The time that each lane is busy if `share` of each tensor goes the picked way."""
        rows = np.arange(len(self))
        busy = np.zeros(self.times.shape[1])
        np.add.at(busy, picked, share * known(self.times[rows, picked]))
        busy += (share * (picked == IN_PLACE)) @ self.beside
        return busy

    def one_busy(self, picked: int) -> Floats:
        """The same for one tensor that goes the picked way whole."""
        busy = self.beside.copy() if picked == IN_PLACE else np.zeros(len(self.times))
        busy[picked] += self.times[picked]
        return busy


def entries(times: Sequence[float], beside: Sequence[float]) -> Iterable[dict[int, float]]:
    """The ways of one tensor, each as the time that it takes of every lane it uses."""
    for lane, ns in enumerate(times):
        if not np.isfinite(ns):
            continue
        found = {lane: ns}
        if lane == IN_PLACE:
            for other, blocked in enumerate(beside):
                if blocked:
                    found[other] = found.get(other, 0.0) + blocked
        yield found
