"""The time in which lanes carry each tensor out of the device and into it, or ops access it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from offcompile.bounds.links import Links
from offcompile.bounds.survey import Floats, Survey, whole_ns
from offcompile.ir import DEVICE, Lane

from .ways import IN_PLACE, Serving


class Crossings:
    """Ways in columns: the compute lane, lanes into the device, lanes out of it, host updates."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.ins = [x for x in survey.lanes if x.target == DEVICE]
        self.outs = [x for x in survey.lanes if x.source == DEVICE]
        self.width = 1 + len(self.ins) + len(self.outs) + 1
        self.links = Links(survey.problem, survey.machine)
        self._known: dict[tuple[bool, str], Serving] = {}
        self._beside: dict[tuple[int, str], Floats] = {}

    def into(self, t: str) -> Serving:
        return self._carried(t, True)

    def out(self, t: str) -> Serving:
        return self._carried(t, False)

    def ns_into(self, t: str) -> dict[int, float]:
        """Column of each lane into the device → the time in which it carries the tensor."""
        return self._ns(t, self.ins, 1)

    def ns_out(self, t: str) -> dict[int, float]:
        return self._ns(t, self.outs, 1 + len(self.ins))

    def or_in_place(self, ways: Serving, t: str, ops: Sequence[int]) -> Serving:
        """Adds the way in which all these ops access the tensor in place."""
        times, beside = ways.times.copy(), np.zeros(self.width)
        direct = [i for i in ops if (i, t) in self.survey.direct_ns]
        times[IN_PLACE] = sum(max(0.0, float(self.survey.direct_ns[i, t])) for i in direct)
        for i in direct:
            beside += self._blocked(i, t)
        return Serving(times, beside)

    def _blocked(self, op: int, t: str) -> Floats:
        """The time in which access in place keeps each lane from moving."""
        if (op, t) not in self._beside:
            taken = [self.links.beside(op, t, lane) for lane in (*self.ins, *self.outs)]
            self._beside[op, t] = np.array([0.0, *taken, 0.0])
        return self._beside[op, t]

    def _carried(self, t: str, inwards: bool) -> Serving:
        if (inwards, t) not in self._known:
            times = np.full(self.width, np.inf)
            for column, ns in (self.ns_into(t) if inwards else self.ns_out(t)).items():
                times[column] = ns
            self._known[inwards, t] = Serving(times, np.zeros(self.width))
        return self._known[inwards, t]

    def _ns(self, t: str, lanes: Sequence[Lane], first: int) -> dict[int, float]:
        tensor, machine = self.survey.problem.tensor[t], self.survey.machine
        return {
            first + i: whole_ns(tensor, lane, machine) * self.links.slowed[lane.name]
            for i, lane in enumerate(lanes)
        }
