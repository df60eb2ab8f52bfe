"""Which run's end lets each load start: late enough to fit beside every run, early enough in time.

Two profiles of device bytes per run are kept. The *hard* one holds what is decided to stay and
the loads placed so far; a load is legal where it fits that one, whatever the lanes' speed. The
*soft* one also holds copies still being written out, by estimate; a load that does not fit it
would only wait in its lane, so triggers keep to it unless the room is expected in time.
"""

from __future__ import annotations

from offcompile.ir import DEVICE

from .lanes import Clock, Trip, last_run_by
from .program import Program, too_small

#: how many runs earlier than needed a load is let start where there is room: enough to even out
#: a lane, and it keeps the builder linear
MOST_EARLY = 512


class Placement:
    """Places the loads of one build, given the outward trips and an estimate of the times."""

    def __init__(
        self,
        program: Program,
        capacity: float,
        kept_bytes: list[int],
        outs: list[Trip],
        clock: Clock,
    ) -> None:
        self.program, self.capacity, self.clock = program, capacity, clock
        self.n, self.steady = len(program.runs), program.problem.steady
        self.hard = list(kept_bytes)
        self.soft = list(kept_bytes)
        #: per run, the copies on their way out when it starts: (µs until gone, bytes)
        self.leaving: list[list[tuple[float, int]]] = [[] for _ in range(self.n)]
        for trip in outs:
            self._add_lag(trip)

    def _add_lag(self, trip: Trip) -> None:
        """A copy that leaves is held until it has been written out."""
        clock, n = self.clock, self.n
        done, leave = trip.hops[0].end_us, trip.job.leave.position
        if leave < trip.job.release.position:  # written in one step, leaves in the next
            done -= clock.period
        for j in range(leave + 1, leave + n if self.steady else n):
            start = clock.starts[j % n] + (clock.period if j >= n else 0.0)
            if start >= done - 1e-9:
                break
            self.soft[j % n] += trip.job.tensor.nbytes
            self.leaving[j % n].append((done - start, trip.job.tensor.nbytes))

    def place(self, loads: list[Trip]) -> None:
        """Triggers for loads in the order of need."""
        for trip in loads:
            if self._waits_for_update(trip):
                continue
            # over two lanes the device space is held from the first hop on: the second starts
            # when the first has ended, and no trigger of its own could hold it back safely
            latest = last_run_by(self.clock, trip.hops[0].start_us, self.steady)
            trip.trigger = self._earliest(trip, latest, self.need(trip))
            self._hold(trip, trip.trigger, self.need(trip))
        before: int | None = None
        for trip in loads:
            # a lane serves in order: to trigger a load before the one ahead of it gains nothing
            floor = self._gap_from(trip) if before is None else max(before, self._gap_from(trip))
            floor = max(floor, trip.trigger - MOST_EARLY)
            if floor < trip.trigger and trip.after_update is None:
                earlier = self._earliest(trip, floor, trip.trigger + 1)
                self._hold(trip, earlier, trip.trigger + 1)
                trip.trigger = earlier
            before = trip.trigger if before is None else max(before, trip.trigger)
        all_wrap = True  # what is queued in the step before must be the head of the order of need
        for trip in loads:
            if trip.trigger > -1 or all_wrap:
                self._start_during(trip)
            all_wrap = all_wrap and trip.trigger < -1

    def need(self, trip: Trip) -> int:
        return trip.job.need.position if trip.job.need else self.n

    def _gap_from(self, trip: Trip) -> int:
        """The earliest trigger in ring coordinates: below -1 in the step before the need."""
        start = trip.job.gap_from
        if start < self.need(trip):
            return start
        # what a host update writes is not there before the step has ended: ops do not wait for it
        return -1 if self._made_by_update(trip) else start - self.n

    def _earliest(self, trip: Trip, wish: int, end: int) -> int:
        """The earliest trigger from `wish` on such that every run before `end` has room."""
        first = max(wish, self._gap_from(trip))
        if trip.job.target != DEVICE:
            return min(first, end - 1)
        room = self.capacity - trip.job.tensor.nbytes
        for j in range(end - 1, first, -1):
            if self.soft[j % self.n] > room:
                return j
        return min(first, end - 1)

    def _hold(self, trip: Trip, trigger: int, until: int) -> None:
        if trip.job.target != DEVICE or trigger + 1 >= until:
            return
        nbytes, n = trip.job.tensor.nbytes, self.n
        first, last = (trigger + 1) % n, (until - 1) % n
        whole = until - trigger - 1 <= n
        parts = [(first, last + 1)] if first <= last else [(first, n), (0, last + 1)]
        for profile in (self.soft, self.hard):
            if not whole:
                for j in range(trigger + 1, until):
                    profile[j % n] += nbytes
                continue
            for a, b in parts:
                profile[a:b] = [held + nbytes for held in profile[a:b]]

    def _start_during(self, trip: Trip) -> None:
        """Let a load start within the run whose end triggers it, when room comes free meanwhile.

        At one instant ops take their space before lanes do: the run starts first, and the load
        waits in its lane for the copies that are leaving.
        """
        t, nbytes = trip.trigger, trip.job.tensor.nbytes
        j = t % self.n
        if trip.after_update is not None or trip.job.target != DEVICE:
            return
        if t <= self._gap_from(trip) or self.hard[j] + nbytes > self.capacity:
            return
        free = self.capacity - self.soft[j]
        lasts = self.clock.ends[j] - self.clock.starts[j]
        for after_us, freed in sorted(self.leaving[j]):
            free += freed
            if after_us < lasts - 1e-6 and free >= nbytes:
                self._hold(trip, t - 1, t + 1)
                trip.trigger = t - 1
                return

    # ---- loads of what a host update makes -----------------------------------------------

    def _made_by_update(self, trip: Trip) -> bool:
        release, runs = trip.job.release, self.program.runs
        return release.writes and release.name is not None and runs[release.position].on_host

    def _waits_for_update(self, trip: Trip) -> bool:
        """Trigger a load by the host update that makes its value, where there is room for that.

        The update keeps its own time: it may run as soon as the ops before it that touch its
        tensors have ended, so the load is held from there on. Where that does not fit, a load for
        the next step may still start with that step.
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
            over = max(range(trigger + 1, need), key=lambda j: self.hard[j % self.n], default=None)
            if over is not None and self.hard[over % self.n] + nbytes > self.capacity:
                if wraps:
                    return False
                needed = self.hard[over % self.n] + nbytes
                what = f"with {trip.job.tensor.id} fetched after its update {release.name}"
                raise too_small(over % self.n, needed, int(self.capacity), self.program, what)
        trip.trigger, trip.after_update = trigger, release.name
        self._hold(trip, trigger, need)
        return True
