"""The one builder: decisions become a plan, with every move's trigger placed so that it is legal.

Legality by construction. A copy that comes in is held from its trigger to its use, and triggers
are placed only where every run in between still fits beside it; loads on a lane are queued in the
order of need. So whatever the lanes' speed, each run finds its room once the copies on their way
out have gone, and nothing can wait in a circle. Timing only decides how early triggers are.
"""

from __future__ import annotations

from offcompile.ir import DEVICE, HOST, Drop, Infeasible, Machine, Move, Plan, Problem, Start

from .contract import Judge
from .decisions import Decisions
from .lanes import Clock, Routes, Trip, fill_backward, fill_forward, last_run_by
from .program import Program, span, too_small
from .residency import Residency, plan_residency

#: how often the builder looks at the simulated times and places triggers anew
ROUNDS = 3


def build(
    problem: Problem, machine: Machine, decisions: Decisions, judge: Judge | None = None
) -> Plan:
    """A legal plan that does what `decisions` says, as fast as the builder can make it.

    Raises `Infeasible` when the device cannot hold what the decisions keep on it.
    """
    return Builder(problem, machine, decisions).best(judge)


class Builder:
    """One set of decisions, built for one or several estimates of the times."""

    def __init__(self, problem: Problem, machine: Machine, decisions: Decisions) -> None:
        self.problem, self.machine, self.decisions = problem, machine, decisions
        self.program = Program(problem, decisions)
        self.residency: Residency = plan_residency(self.program, decisions)
        capacity = machine.tier[DEVICE].capacity_bytes
        self.capacity = float("inf") if capacity is None else capacity
        self.n = len(self.program.runs)
        self.kept_bytes = self._kept()

    def best(self, judge: Judge | None) -> Plan:
        """The best of a few builds, each with the times that the one before really had."""
        clock = Clock.unhindered(self.program)
        best = self.at(clock)
        if judge is None or not best.moves:
            return best
        timeline = judge(self.problem, self.machine, best)
        best_us = timeline.makespan_us if timeline.valid else float("inf")
        for _ in range(ROUNDS):
            if not timeline.valid or best_us <= clock.period:
                break
            plan = self.at(Clock.simulated(self.program, timeline))
            timeline = judge(self.problem, self.machine, plan)
            if not timeline.valid or timeline.makespan_us >= best_us:
                break
            best, best_us = plan, timeline.makespan_us
        return best

    def _kept(self) -> list[int]:
        """Per run, the bytes that the decisions hold on the device; checked against its size."""
        kept = list(self.program.op_bytes)
        for tensor, first, last in self.residency.held:
            for j in span(first, last, self.n):
                kept[j] += tensor.nbytes
        for j, need in enumerate(kept):
            if need > self.capacity:
                what = f"{self.program.op_bytes[j]:,} of its own and what stays beside it"
                raise too_small(j, need, int(self.capacity), self.program, what)
        return kept

    def at(self, clock: Clock) -> Plan:
        """The plan whose triggers suit these times."""
        routes = Routes(self.machine)
        outs = [routes.trip(j) for j in self.residency.outs]
        loads = [routes.trip(j) for j in self.residency.loads]
        fill_forward(outs, clock, self.problem.steady)
        fill_backward(loads, clock, self.problem.steady)
        profile = self._with_lag(outs, clock)
        self._place(loads, profile, clock)
        return self._emit(outs, loads)

    def _with_lag(self, outs: list[Trip], clock: Clock) -> list[int]:
        """Bytes held per run, copies still being written out included."""
        profile = list(self.kept_bytes)
        n, steady = self.n, self.problem.steady
        for trip in outs:
            done, leave = trip.hops[0].end_us, trip.job.leave.position
            if leave < trip.job.release.position:  # written in one step, leaves in the next
                done -= clock.period
            for j in range(leave + 1, leave + n if steady else n):
                start = clock.starts[j % n] + (clock.period if j >= n else 0.0)
                if start >= done - 1e-9:
                    break
                profile[j % n] += trip.job.tensor.nbytes
        return profile

    # ---- where loads may start -----------------------------------------------------------

    def _place(self, loads: list[Trip], profile: list[int], clock: Clock) -> None:
        """Choose triggers: first as late as harms nobody, then earlier where there is room."""
        loads.sort(key=lambda t: t.job.need.position if t.job.need else self.n)
        for trip in loads:
            latest = last_run_by(clock, trip.hops[-1].start_us, self.problem.steady)
            trip.trigger = self._earliest(trip, profile, latest)
            self._hold(trip, profile, trip.trigger, self._need(trip))
        before: int | None = None
        for trip in loads:
            # a lane serves in order: to trigger a load before the one ahead of it gains nothing
            floor = self._gap_from(trip) if before is None else max(before, self._gap_from(trip))
            if floor < trip.trigger:
                earlier = self._earliest(trip, profile, floor, trip.trigger + 1)
                self._hold(trip, profile, earlier, trip.trigger + 1)
                trip.trigger = earlier
            before = trip.trigger if before is None else max(before, trip.trigger)
        for trip in loads:
            trip.first_trigger = trip.trigger
            if len(trip.hops) > 1:
                first = last_run_by(clock, trip.hops[0].start_us, self.problem.steady)
                trip.first_trigger = max(min(first, trip.trigger), self._gap_from(trip))

    def _need(self, trip: Trip) -> int:
        return trip.job.need.position if trip.job.need else self.n

    def _gap_from(self, trip: Trip) -> int:
        """The earliest trigger in ring coordinates: below -1 in the step before the need."""
        start = trip.job.gap_from
        return start if start < self._need(trip) else start - self.n

    def _earliest(self, trip: Trip, profile: list[int], wish: int, until: int | None = None) -> int:
        """The earliest trigger from `wish` on such that every run up to the need has room."""
        end = self._need(trip) if until is None else until
        first = max(wish, self._gap_from(trip))
        if trip.job.target != DEVICE:
            return min(first, end - 1)
        room = self.capacity - trip.job.tensor.nbytes
        for j in range(end - 1, first, -1):
            if profile[j % self.n] > room:
                return j
        return min(first, end - 1)

    def _hold(self, trip: Trip, profile: list[int], trigger: int, until: int) -> None:
        if trip.job.target == DEVICE:
            for j in range(trigger + 1, until):
                profile[j % self.n] += trip.job.tensor.nbytes

    # ---- the plan ------------------------------------------------------------------------

    def _emit(self, outs: list[Trip], loads: list[Trip]) -> Plan:
        start = {t: set(tiers) for t, tiers in self.residency.start.items()}
        moves: list[Move] = []
        drops = list(self.residency.drops)
        for trip in sorted(outs, key=lambda t: t.order):
            job = trip.job
            need = None if job.need is None else job.need.position
            wraps = (
                self.problem.steady
                and not self._ends_in_step(trip)
                and (need is None or need <= job.release.position)
            )
            self._add_moves(trip, "out", job.release.name, None, wraps, moves, drops)
            if wraps:
                start.setdefault(job.tensor.id, set()).add(job.target)
        before: int | None = None
        placed = []
        for trip in loads:
            trigger = trip.trigger if before is None else max(trip.trigger, before)
            before = trigger
            placed.append((trigger < -1, trip))
        for wraps, trip in sorted(placed, key=lambda x: x[0]):
            name = self._trigger_name(trip.trigger if len(trip.hops) == 1 else trip.first_trigger)
            ready = trip.job.need.name if trip.job.need else None
            self._add_moves(trip, "in", name, ready, wraps, moves, drops)
            if wraps:
                start.setdefault(trip.job.tensor.id, set()).add(trip.job.target)
        return Plan(
            start=self._start(start),
            moves=tuple(moves),
            drops=tuple(drops),
            directs=self.decisions.directs,
            recomputes=self._ordered_recomputes(),
            updates=self.decisions.updates,
        )

    def _ordered_recomputes(self) -> tuple:  # type: ignore[type-arg]
        index = self.problem.op_index
        return tuple(
            sorted(self.decisions.recomputes, key=lambda r: (index[r.before], index[r.op]))
        )

    def _ends_in_step(self, trip: Trip) -> bool:
        return trip.job.tensor.kind in ("activation", "temporary")

    def _trigger_name(self, position: int) -> str | None:
        """The op after which a move starts; host updates keep their own time and do not serve."""
        if position == -1:
            return None
        runs = self.program.runs
        at = position % self.n
        for j in range(at, -1, -1):
            if not runs[j].on_host:
                return runs[j].name
        return None

    def _add_moves(
        self,
        trip: Trip,
        word: str,
        after: str | None,
        ready: str | None,
        wraps: bool,
        moves: list[Move],
        drops: list[Drop],
    ) -> None:
        job = trip.job
        label = after if word == "out" else ready
        previous = job.source
        for i, hop in enumerate(trip.hops):
            suffix = f"/{i + 1}" if len(trip.hops) > 1 else ""
            last = i == len(trip.hops) - 1
            move = Move(
                id=self._unique(f"{word}:{job.tensor.id}:{label or 'start'}{suffix}"),
                tensor=job.tensor.id,
                source=previous,
                target=hop.lane.target,
                lane=hop.lane.name,
                start_after=after,
                ready_before=ready if last else None,
                wraps=wraps,
                codec=job.codec,
            )
            moves.append(move)
            if i and previous != DEVICE:
                drops.append(Drop(job.tensor.id, previous, move.id))
            after, previous = move.id, hop.lane.target

    def _unique(self, name: str) -> str:
        return name if name not in self.program.position else f"move {name}"

    def _start(self, start: dict[str, set[str]]) -> tuple[Start, ...]:
        order = [t.name for t in self.machine.tiers]
        copies = []
        for tensor in self.problem.tensors:
            for tier in sorted(start.get(tensor.id, ()), key=lambda x: (x not in order, x)):
                copies.append(Start(tensor.id, tier if tier in order else DEVICE))
        return tuple(dict.fromkeys(copies))


def plain_plan(problem: Problem, machine: Machine) -> Plan:
    """Everything on the device, nothing moved that need not be. Raises if it does not fit."""
    return build(problem, machine, Decisions())


__all__ = ["HOST", "Builder", "Infeasible", "build", "plain_plan"]
