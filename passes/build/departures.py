"""Estimates when evictions run, and in what order a lane takes them.

Each runs as early as its value and its lane allow; among those that are ready, the one whose tensor
leaves first goes first. A gradient for an update on the host may pass states that wait for the same
lane, so that the host need not wait for them. They are then counted as being on the device until
the gradient is made: any run up to there finds its memory without them, whatever the speed of the
lanes.
"""

from __future__ import annotations

import heapq

from offcompile.ir import HOST

from .lanes import LaneClock, LaneTrip
from .profile import MemoryProfile

#: (end of the last access before the tensor leaves, number in order of release, trip)
_Ready = tuple[float, int, LaneTrip]


class Departures:
    """Orders the evictions of one build."""

    def __init__(
        self, outs: list[LaneTrip], clock: LaneClock, kept_bytes: list[int], capacity: float
    ) -> None:
        self.outs, self.clock = outs, clock
        self.kept_bytes, self.capacity = kept_bytes, capacity
        #: with the tensors that others pass
        self.held = MemoryProfile(kept_bytes)
        self.may_pass = any(map(_is_urgent, outs))

    def order(self, steady: bool) -> list[int]:
        """Sets the times and the order of the trips; returns the bytes kept per run.

        In a steady problem, work that a lane has not finished at the end of a step delays it in the
        next, hence two rounds.
        """
        clock, carried = self.clock, dict[str, float]()
        for _ in range(2 if steady else 1):
            free = dict(carried)
            self._round(free)
            carried = {lane: end - clock.period for lane, end in free.items() if end > clock.period}
        return self.held.values()

    def _round(self, free: dict[str, float]) -> None:
        clock = self.clock
        self.held = MemoryProfile(self.kept_bytes)
        todo = sorted(self.outs, key=lambda t: clock.end_of(t.job.release.position))
        ready: list[_Ready] = []
        i, now = 0, 0.0
        while i < len(todo) or ready:
            if not ready:
                now = max(now, clock.end_of(todo[i].job.release.position))
            while i < len(todo) and clock.end_of(todo[i].job.release.position) <= now:
                todo[i].leave = todo[i].job.leave.position
                heapq.heappush(ready, (self._due(todo[i]), i, todo[i]))
                i += 1
            trip = self._next(ready)
            at = now
            for hop in trip.hops:
                hop.start_us = max(at, free.get(hop.lane.name, 0.0))
                hop.end_us = at = hop.start_us + hop.duration_us
                free[hop.lane.name] = at
            trip.order = trip.hops[0].start_us
            now = max(now, free[trip.hops[0].lane.name])

    def _due(self, trip: LaneTrip) -> float:
        wraps = trip.leave < trip.job.release.position
        return self.clock.end_of(trip.leave) + (self.clock.period if wraps else 0.0)

    def _next(self, ready: list[_Ready]) -> LaneTrip:
        """Takes the next trip from those that are ready."""
        urgent = [r for r in ready if _is_urgent(r[2])] if self.may_pass else []
        first = min(urgent, default=ready[0])
        passed = [r[2] for r in ready if r < first]
        if not passed or not self._let_pass(passed, first[2].job.release.position):
            return heapq.heappop(ready)[2]
        ready[:] = [(self._due(trip), i, trip) for _, i, trip in ready if trip is not first[2]]
        heapq.heapify(ready)
        return first[2]

    def _let_pass(self, passed: list[LaneTrip], until: int) -> bool:
        """Keeps the tensors of these trips on the device until that run, if there is room."""
        if any(trip.leave < trip.job.release.position for trip in passed):
            return False  # one leaves in the next step
        kept: list[LaneTrip] = []
        for trip in passed:
            if trip.leave < until:
                room = self.capacity - trip.job.tensor.nbytes
                if self.held.last_over(trip.leave + 1, until + 1, room) is not None:
                    break
                self.held.add(trip.leave + 1, until + 1, trip.job.tensor.nbytes)
                kept.append(trip)
        else:
            for trip in kept:
                trip.leave = until
            return True
        for trip in kept:
            self.held.add(trip.leave + 1, until + 1, -trip.job.tensor.nbytes)
        return False


def _is_urgent(trip: LaneTrip) -> bool:
    """True for a gradient that an update on the host waits for."""
    job = trip.job
    return job.tensor.kind == "gradient" and job.need is not None and job.need.tier == HOST
