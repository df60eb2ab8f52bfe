"""Estimates when copies run: their routes, and the times of those onto the device.

Times are estimates in microseconds on the ring of one step. They only choose triggers; the legality
of a plan never depends on them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from offcompile.ir import Infeasible, Lane, Machine, Tensor, Timeline

from .program import Program
from .required_copies import Job


@dataclass(frozen=True, slots=True)
class LaneClock:
    """Start and end of each run of a step, estimated or simulated."""

    starts: list[float]
    ends: list[float]
    period: float

    @staticmethod
    def unhindered(program: Program) -> LaneClock:
        starts = program.starts_us()
        ends = [s + r.duration_us for s, r in zip(starts, program.runs, strict=False)]
        return LaneClock(starts[:-1], ends, starts[-1])

    @staticmethod
    def simulated(program: Program, timeline: Timeline) -> LaneClock:
        """Returns the times of the last simulated step, relative to its start."""
        last = len(timeline.steps) - 1
        origin = timeline.steps[last][0]
        starts, ends = [0.0] * len(program.runs), [0.0] * len(program.runs)
        for s in timeline.spans:
            at = program.position.get(s.id)
            if s.step == last and at is not None:
                starts[at] = (s.start_ns - origin) / 1000
                ends[at] = (s.end_ns - origin) / 1000
        return LaneClock(starts, ends, timeline.makespan_us)

    def end_of(self, position: int) -> float:
        return 0.0 if position < 0 else self.ends[position]


@dataclass(slots=True)
class Hop:
    """The part of a job on one lane."""

    lane: Lane
    duration_us: float
    start_us: float = 0.0
    end_us: float = 0.0


@dataclass(slots=True)
class LaneTrip:
    """A job with its route: one hop, or two via the host."""

    job: Job
    hops: list[Hop]
    #: ring position after which it may start (below -1: in the previous step)
    trigger: int = 0
    #: the host update that produces the value: only its end is certain to come after the value
    after_update: str | None = None
    #: evictions: the run until whose end the copy counts as being on the device
    leave: int = 0
    order: float = 0.0


class Routes:
    """Finds the lanes from one tier to another, and the transfer times of tensors."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.load_us: dict[str, float] = {}

    def lanes(self, source: str, target: str) -> list[Lane]:
        direct = self.machine.lanes_between(source, target)
        if direct:
            return [self._least_loaded(direct)]
        for tier in self.machine.tiers:
            first = self.machine.lanes_between(source, tier.name)
            second = self.machine.lanes_between(tier.name, target)
            if first and second:
                return [self._least_loaded(first), self._least_loaded(second)]
        raise Infeasible(
            f"No lane leads from {source} to {target}, not even over another tier.",
            None,
            f"Add a lane from {source} to {target} to the machine.",
        )

    def _least_loaded(self, lanes: tuple[Lane, ...]) -> Lane:
        return min(lanes, key=lambda x: self.load_us.get(x.name, 0.0))

    def trip(self, job: Job) -> LaneTrip:
        hops = [
            Hop(lane, self.move_us(job.tensor, lane, job.codec))
            for lane in self.lanes(job.source, job.target)
        ]
        for hop in hops:
            self.load_us[hop.lane.name] = self.load_us.get(hop.lane.name, 0.0) + hop.duration_us
        return LaneTrip(job, hops)

    def move_us(self, tensor: Tensor, lane: Lane, codec: str | None) -> float:
        if codec is None:
            return lane.latency_us + tensor.nbytes / lane.bytes_per_us
        moved = tensor.nbytes * tensor.ratios[codec] / lane.bytes_per_us
        return lane.latency_us + max(moved, tensor.nbytes / self.machine.codec[codec].bytes_per_us)


def fill_backward(trips: list[LaneTrip], clock: LaneClock, steady: bool) -> None:
    """Schedules loads in order of need, each as late as possible without making an op wait."""
    order = sorted(trips, key=lambda t: t.job.need.position if t.job.need else 0, reverse=True)
    ceiling: dict[str, float] = {}
    for _ in range(2 if steady else 1):
        following = dict(ceiling)
        for trip in order:
            end = clock.starts[trip.job.need.position] if trip.job.need else clock.period
            for hop in reversed(trip.hops):
                end = min(end, following.get(hop.lane.name, float("inf")))
                hop.end_us = end
                hop.start_us = end = end - hop.duration_us
                following[hop.lane.name] = end
        ceiling = {lane: start + clock.period for lane, start in following.items()}


def last_run_by(clock: LaneClock, time_us: float, steady: bool) -> int:
    """Returns the last position whose run has ended by `time_us` (negative: previous step)."""
    n = len(clock.ends)
    if time_us >= 0 or not steady or clock.period <= 0:
        return bisect_right(clock.ends, time_us + 1e-9) - 1
    steps = int(-time_us // clock.period) + 1
    within = time_us + steps * clock.period
    return max(bisect_right(clock.ends, within + 1e-9) - 1 - steps * n, -2 * n)
