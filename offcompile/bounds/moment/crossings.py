"""The time in which lanes carry each tensor out of the device and into it, or ops access it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from offcompile.bounds.links import Links
from offcompile.bounds.survey import Floats, Survey, whole_ns
from offcompile.ir import DEVICE

from .ways import IN_PLACE, Serving


class Crossings:
    """Ways in columns: the compute lane, lanes into the device, lanes out of it, host updates."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.ins = [x for x in survey.lanes if x.target == DEVICE]
        self.outs = [x for x in survey.lanes if x.source == DEVICE]
        self.width = 1 + len(self.ins) + len(self.outs) + 1
        self.links = Links(survey.problem, survey.machine)
        # moments ask for the same again and again
        self._ns: dict[tuple[bool, str], dict[int, float]] = {}
        self._known: dict[tuple[bool, str], Serving] = {}
        self._in_place: dict[tuple[Serving, str, tuple[int, ...]], Serving] = {}
        self._beside: dict[tuple[int, str], Floats] = {}

    def into(self, t: str) -> Serving:
        return self._carried(t, True)

    def out(self, t: str) -> Serving:
        return self._carried(t, False)

    def ns_into(self, t: str) -> Mapping[int, float]:
        """Column of each lane into the device → the time in which it carries the tensor."""
        return self._ns_of(t, True)

    def ns_out(self, t: str) -> Mapping[int, float]:
        return self._ns_of(t, False)

    def or_in_place(self, ways: Serving, t: str, ops: Sequence[int]) -> Serving:
        """Adds the way in which all these ops access the tensor in place."""
        key = (ways, t, tuple(ops))
        if key not in self._in_place:
            times, beside = ways.times.copy(), np.zeros(self.width)
            direct = [i for i in ops if (i, t) in self.survey.direct_ns]
            times[IN_PLACE] = sum(max(0.0, float(self.survey.direct_ns[i, t])) for i in direct)
            for i in direct:
                beside += self._blocked(i, t)
            self._in_place[key] = Serving(times, beside)
        return self._in_place[key]

    def _blocked(self, op: int, t: str) -> Floats:
        """The time in which access in place keeps each lane from moving."""
        if (op, t) not in self._beside:
            taken = [self.links.beside(op, t, lane) for lane in (*self.ins, *self.outs)]
            self._beside[op, t] = np.array([0.0, *taken, 0.0])
        return self._beside[op, t]

    def _carried(self, t: str, inwards: bool) -> Serving:
        if (inwards, t) not in self._known:
            times = np.full(self.width, np.inf)
            for column, ns in self._ns_of(t, inwards).items():
                times[column] = ns
            self._known[inwards, t] = Serving(times, np.zeros(self.width))
        return self._known[inwards, t]

    def _ns_of(self, t: str, inwards: bool) -> Mapping[int, float]:
        if (inwards, t) not in self._ns:
            tensor, machine = self.survey.problem.tensor[t], self.survey.machine
            lanes, first = (self.ins, 1) if inwards else (self.outs, 1 + len(self.ins))
            self._ns[inwards, t] = {
                first + i: whole_ns(tensor, lane, machine) * self.links.slowed[lane.name]
                for i, lane in enumerate(lanes)
            }
        return self._ns[inwards, t]
