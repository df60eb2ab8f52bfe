"""Chooses the run after which each load starts: late enough to fit, early enough to be in time.

There are two profiles of device bytes per run. The *hard* one contains everything decided to stay
and the loads placed so far; a load that fits it is legal, whatever the speed of the lanes. The
*soft* one also contains evictions still in flight, by estimate. A load that does not fit it would
only wait in its lane, so triggers respect it unless the memory is expected to be free in time.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate

from offcompile.ir import DEVICE

from .lanes import LaneClock, LaneTrip, last_run_by
from .profile import MemoryProfile
from .program import Intervals, Program, too_small

#: number of runs by which a load may start early if there is room: enough to even out a lane, and
#: it keeps the builder linear
MOST_EARLY = 512


class Placement:
    """Places the loads of one build, given the evictions and an estimate of the times."""

    def __init__(
        self,
        program: Program,
        capacity: float,
        kept_bytes: list[int],
        outs: list[LaneTrip],
        clock: LaneClock,
    ) -> None:
        self.program, self.capacity, self.clock = program, capacity, clock
        self.n, self.steady = len(program.runs), program.problem.steady
        self.hard = MemoryProfile(kept_bytes)
        #: evictions in flight: (end time, first run at which the copy is present, first run at
        #: which it is not, bytes)
        self._lags: list[tuple[float, int, int, int]] = []
        #: running maximum of the start times
        self._latest = list(accumulate(clock.starts, max))
        lags = Intervals(self.n)
        for trip in outs:
            first, end, done = self._lag(trip)
            if end > first:
                self._lags.append((done, first, end, trip.job.tensor.nbytes))
                lags.add(first - 1, end if end <= self.n else end - self.n, trip.job.tensor.nbytes)
        self._lags.sort()
        held = zip(kept_bytes, lags.sums(), strict=True)
        self.soft = (
            MemoryProfile([kept + lag for kept, lag in held]) if self._lags else self.hard.copy()
        )

    def _lag(self, trip: LaneTrip) -> tuple[int, int, float]:
        """Returns the runs (ring positions) that start during an eviction, and its end time."""
        clock, n = self.clock, self.n
        done, leave = trip.hops[0].end_us, trip.leave
        if leave < trip.job.release.position:  # written in one step, evicted in the next
            done -= clock.period
        gone = done - 1e-9
        end = self._first_start(leave + 1, gone, 0.0)
        if end < n or not self.steady:
            return leave + 1, end, done
        return leave + 1, min(leave + n, n + self._first_start(0, gone, clock.period)), done

    def _first_start(self, first: int, time_us: float, shift_us: float) -> int:
        """Returns the first run from `first` on that starts no earlier; if none, the run count.

        shift_us: added to all start times.
        """
        latest, starts = self._latest, self.clock.starts
        if first and latest[first - 1] + shift_us >= time_us:  # an earlier run starts later
            return next(
                (j for j in range(first, self.n) if starts[j] + shift_us >= time_us), self.n
            )
        return bisect_left(latest, time_us, first, key=lambda start: start + shift_us)

    def _leaving(self, j: int, within_us: float) -> list[tuple[float, int]]:
        """Returns evictions in flight at the start of a run that end soon, earliest first.

        Each is (µs until the end, bytes).
        """
        n, start = self.n, self.clock.starts[j]
        found = []
        for at, begun in ((j, start), (j + n, start + self.clock.period)):
            low = bisect_left(self._lags, (begun - 1.0,))
            high = bisect_left(self._lags, (begun + within_us + 1.0,))
            for done, first, end, nbytes in self._lags[low:high]:
                if first <= at < end and done - begun < within_us:
                    found.append((done - begun, nbytes))
        return sorted(found)

    def place(self, loads: list[LaneTrip]) -> None:
        """Sets the triggers of loads, which are in order of need."""
        for trip in loads:
            if self._waits_for_update(trip):
                continue
            # with two lanes the device memory is held from the first hop on: the second starts when
            # the first has ended, and a trigger of its own could not delay it safely
            latest = last_run_by(self.clock, trip.hops[0].start_us, self.steady)
            trip.trigger = self._earliest(trip, latest, self.need(trip))
            self._hold(trip, trip.trigger, self.need(trip))
        before: int | None = None
        for trip in loads:
            # lanes are FIFO: triggering a load before the one ahead of it gains nothing
            floor = self._gap_from(trip) if before is None else max(before, self._gap_from(trip))
            floor = max(floor, trip.trigger - MOST_EARLY)
            if floor < trip.trigger and trip.after_update is None:
                earlier = self._earliest(trip, floor, trip.trigger + 1)
                self._hold(trip, earlier, trip.trigger + 1)
                trip.trigger = earlier
            before = trip.trigger if before is None else max(before, trip.trigger)
        all_wrap = True  # loads queued in the previous step must come first in the order of need
        for trip in loads:
            if trip.trigger > -1 or all_wrap:
                self._start_during(trip)
            all_wrap = all_wrap and trip.trigger < -1

    def need(self, trip: LaneTrip) -> int:
        return trip.job.need.position if trip.job.need else self.n

    def _gap_from(self, trip: LaneTrip) -> int:
        """Returns the earliest trigger as a ring position: below -1 in the step before the need."""
        start = trip.job.gap_from
        if start < self.need(trip):
            return start
        # the output of a host update is not available before the step ends: ops do not wait for it
        return -1 if self._made_by_update(trip) else start - self.n

    def _earliest(self, trip: LaneTrip, wish: int, end: int) -> int:
        """Returns the earliest trigger from `wish` on such that every run before `end` has room."""
        first = max(wish, self._gap_from(trip))
        if trip.job.target != DEVICE:
            return min(first, end - 1)
        room = self.capacity - trip.job.tensor.nbytes
        over = self._last_over(first + 1, end, room)
        return min(first, end - 1) if over is None else over

    def _last_over(self, first: int, end: int, room: float) -> int | None:
        """Returns the last run (ring position) from `first` to before `end` without this room."""
        n, soft = self.n, self.soft
        while first < end:
            turn = (end - 1) // n * n  # the start of the step that contains the last run
            low = max(first, turn)
            at = soft.last_over(low - turn, end - turn, room)
            if at is not None:
                return at + turn
            end = low
        return None

    def _hold(self, trip: LaneTrip, trigger: int, until: int) -> None:
        if trip.job.target != DEVICE or trigger + 1 >= until:
            return
        nbytes, n, first = trip.job.tensor.nbytes, self.n, trigger + 1
        while first < until:
            turn = first // n * n
            end = min(until, turn + n)
            self.soft.add(first - turn, end - turn, nbytes)
            self.hard.add(first - turn, end - turn, nbytes)
            first = end

    def _start_during(self, trip: LaneTrip) -> None:
        """Starts a load during the run whose end triggers it, if memory is freed in the meantime.

        At the same instant, ops allocate before lanes do: the run starts first, and the load waits
        in its lane for the evictions in flight.
        """
        t, nbytes = trip.trigger, trip.job.tensor.nbytes
        j = t % self.n
        if trip.after_update is not None or trip.job.target != DEVICE:
            return
        if t <= self._gap_from(trip) or self.hard[j] + nbytes > self.capacity:
            return
        free = self.capacity - self.soft[j]
        lasts = self.clock.ends[j] - self.clock.starts[j]
        for _, freed in self._leaving(j, lasts - 1e-6):
            free += freed
            if free >= nbytes:
                self._hold(trip, t - 1, t + 1)
                trip.trigger = t - 1
                return

    # ---- loads of the outputs of host updates ---------------------------------------------

    def _made_by_update(self, trip: LaneTrip) -> bool:
        release, runs = trip.job.release, self.program.runs
        return release.writes and release.name is not None and runs[release.position].on_host

    def _waits_for_update(self, trip: LaneTrip) -> bool:
        """Triggers a load by the host update that produces its value, if there is room for that.

        The update runs asynchronously: it may start as soon as the ops before it that touch its
        tensors have ended, so the memory of the load is held from then on. If that does not fit, a
        load for the next step may still start at the beginning of that step.
        """
        if not self._made_by_update(trip):
            return False
        release, need, runs = trip.job.release, self.need(trip), self.program.runs
        before = [
            a.position
            for t in runs[release.position].op.operands
            for a in self.program.accesses[t]
            if a.position < release.position and not runs[a.position].on_host
        ]
        earliest = max(before, default=-1)
        wraps = release.position >= need
        trigger = earliest - self.n if wraps else earliest
        nbytes = trip.job.tensor.nbytes
        if trip.job.target == DEVICE:
            n, held = self.n, self.hard.values()
            over = max(range(trigger + 1, need), key=lambda j: held[j % n], default=None)
            if over is not None and held[over % n] + nbytes > self.capacity:
                if wraps:
                    return False
                needed = held[over % n] + nbytes
                what = f"with {trip.job.tensor.id} fetched after its update {release.name}"
                raise too_small(over % n, needed, int(self.capacity), self.program, what)
        trip.trigger, trip.after_update = trigger, release.name
        self._hold(trip, trigger, need)
        return True
