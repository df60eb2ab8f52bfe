"""The builder: turns decisions into a plan and places the trigger of every move legally.

Plans are legal by construction. Memory for a load is held from its trigger to its use, and triggers
are placed only where every run in between still fits next to it; loads on a lane are queued in
order of need. So whatever the speed of the lanes, each run finds its memory once the evictions in
flight have finished, and there is no deadlock. Timing only decides how early triggers are.
"""

from __future__ import annotations

from offcompile.ir import (
    DEVICE,
    SELF_ENDING_KINDS,
    Drop,
    Infeasible,
    Machine,
    Move,
    Plan,
    Problem,
    Start,
)

from .contract import Judge
from .decisions import Decisions
from .departures import Departures
from .lanes import LaneClock, LaneTrip, Routes, fill_backward
from .placement import Placement
from .program import Intervals, Program, too_small
from .required_copies import Residency, plan_residency

#: number of times that the builder places triggers again with the simulated times
ROUNDS = 3


def build(
    problem: Problem, machine: Machine, decisions: Decisions, judge: Judge | None = None
) -> Plan:
    """Builds a legal plan for `decisions`, as fast as the builder can make it.

    Raises `Infeasible` if the device cannot hold everything that the decisions keep on it.
    """
    return Builder(problem, machine, decisions).best(judge)


class Builder:
    """Builds plans for one set of decisions, with one or several estimates of the times."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        decisions: Decisions,
        check: bool = True,
        program: Program | None = None,
    ) -> None:
        """program: the program of the decisions, if the caller already has it."""
        self.problem, self.machine, self.decisions = problem, machine, decisions
        self.program = program or Program.of(problem, decisions)
        self.residency: Residency = plan_residency(self.program, decisions)
        capacity = machine.tier[DEVICE].capacity_bytes
        self.capacity = float("inf") if capacity is None else capacity
        self.runs = self.program.runs
        self.n = len(self.runs)
        self.dropped_after: dict[tuple[str, str], list[str]] = {}
        for drop in self.residency.drops:
            if drop.after is not None:
                self.dropped_after.setdefault((drop.tensor, drop.tier), []).append(drop.after)
        self.kept_bytes = self._kept()
        if check:
            self._check_kept()

    def reserve(self, nbytes: float) -> None:
        """Keeps this many bytes free when placing loads, as far as the kept tensors allow."""
        self.capacity = max(self.capacity - nbytes, max(self.kept_bytes, default=0))

    def lazy(self) -> Plan:
        """Returns the plan without overlap: loads start after the run before their use."""
        return self.at(LaneClock.unhindered(self.program), lazy=True)

    def best(self, judge: Judge | None) -> Plan:
        """Returns the best of a few builds, each using the simulated times of the one before."""
        clock = LaneClock.unhindered(self.program)
        best = self.at(clock)
        if judge is None or not best.moves:
            return best
        timeline = judge(self.problem, self.machine, best)
        best_us = timeline.cost_us if timeline.valid else float("inf")
        for _ in range(ROUNDS):
            if not timeline.valid or best_us <= clock.period:
                break
            plan = self.at(LaneClock.simulated(self.program, timeline))
            timeline = judge(self.problem, self.machine, plan)
            if not timeline.valid or timeline.cost_us >= best_us:
                break
            best, best_us = plan, timeline.cost_us
        return best

    def _kept(self) -> list[int]:
        """Returns the bytes per run that the decisions hold on the device."""
        held = Intervals(self.n)
        for tensor, first, last in self.residency.held:
            held.add(first, last, tensor.nbytes)
        idle = self._idle_bytes()
        return [a + b + idle for a, b in zip(self.program.op_bytes, held.sums(), strict=True)]

    def _idle_bytes(self) -> int:
        """Returns device bytes of tensors that no op touches.

        They stay on their home tier, or on the device if the machine lacks that tier. Tensors
        pinned to the device stay there.
        """
        if not self.problem.steady:
            return 0  # homes are given, and `residency` accounts for them
        return sum(
            t.nbytes
            for t in self.problem.tensors
            if not self.program.accesses[t.id]
            and any(
                tier == DEVICE or tier not in self.machine.tier
                for tier in self.residency.start.get(t.id, ())
            )
        )

    def _check_kept(self) -> None:
        self._check_homes()
        kept = self.kept_bytes
        j = max(range(self.n), key=kept.__getitem__, default=0)
        if kept and kept[j] > self.capacity:
            what = f"{self.program.op_bytes[j]:,} of its own and what stays beside it"
            raise too_small(j, kept[j], int(self.capacity), self.program, what)

    def _check_homes(self) -> None:
        """Raises if homes do not fit as they are, where no move can precede the step."""
        if self.problem.steady:
            return
        for tier in self.machine.tiers:
            used = sum(t.nbytes for t in self.problem.tensors if t.home == tier.name)
            if tier.capacity_bytes is not None and used > tier.capacity_bytes:
                over = used - tier.capacity_bytes
                raise Infeasible(
                    f"Tensors at home on {tier.name} take {used:,} bytes and its capacity is"
                    f" {tier.capacity_bytes:,}: {over:,} are missing.",
                    over,
                    f"Raise the capacity of {tier.name} to {used:,} bytes, or give some of them"
                    " another home.",
                )

    def at(self, clock: LaneClock, lazy: bool = False) -> Plan:
        """Returns the plan with triggers for these times."""
        routes = Routes(self.machine)
        outs = [routes.trip(j) for j in self.residency.outs]
        loads = [routes.trip(j) for j in self.residency.loads]
        departures = Departures(outs, clock, self.kept_bytes, self.capacity)
        kept_bytes = departures.order(self.problem.steady)
        fill_backward(loads, clock, self.problem.steady)
        placement = Placement(self.program, self.capacity, kept_bytes, outs, clock)
        loads.sort(key=placement.need)
        if lazy:
            for trip in loads:
                trip.trigger = placement.need(trip) - 1
        else:
            placement.place(loads)
        return self._emit(outs, loads)

    # ---- the plan ------------------------------------------------------------------------

    def _emit(self, outs: list[LaneTrip], loads: list[LaneTrip]) -> Plan:
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
            self._add_out(trip, wraps, moves, drops)
            if wraps:
                start.setdefault(job.tensor.id, set()).add(job.target)
        for trip in sorted(loads, key=self._wraps):
            self._add_load(trip, moves, drops)
            if self._wraps(trip):
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

    def _ends_in_step(self, trip: LaneTrip) -> bool:
        """True if the copy is dropped or overwritten within the step, or its tensor dies anyway."""
        job, position = trip.job, self.program.position
        if job.tensor.kind in SELF_ENDING_KINDS:
            return True
        made = job.release.position
        dropped = self.dropped_after.get((job.tensor.id, job.target), ())
        return any(position[name] > made for name in dropped) or any(
            a.writes and a.position > made for a in self.program.accesses[job.tensor.id]
        )

    def _trigger_name(self, position: int) -> str | None:
        """Returns the op that triggers a move; host updates run asynchronously and trigger none."""
        if position == -1:
            return None
        runs = self.runs
        at = position % self.n
        for j in range(at, -1, -1):
            if not runs[j].on_host:
                return runs[j].name
        return None

    def _add_out(self, trip: LaneTrip, wraps: bool, moves: list[Move], drops: list[Drop]) -> None:
        """Adds an eviction over one lane, or over two with a stop on the host."""
        job, after, source = trip.job, trip.job.release.name, trip.job.source
        for hop in trip.hops:
            name = f"out:{job.tensor.id}:{job.release.name or 'start'}"
            move = Move(
                id=self._unique(name if source == job.source else f"{name}/2"),
                tensor=job.tensor.id,
                source=source,
                target=hop.lane.target,
                lane=hop.lane.name,
                start_after=after,
                wraps=wraps,
                codec=job.codec,
            )
            moves.append(move)
            if source != job.source:
                drops.append(Drop(job.tensor.id, source, move.id))
            after, source = move.id, hop.lane.target

    def _add_load(self, trip: LaneTrip, moves: list[Move], drops: list[Drop]) -> None:
        job, after = trip.job, trip.after_update or self._trigger_name(trip.trigger)
        need = job.need.name if job.need else None
        for i, hop in enumerate(trip.hops):
            last = i == len(trip.hops) - 1
            name = f"in:{job.tensor.id}:{need or 'end'}"
            move = Move(
                id=self._unique(name if last else f"{name}/1"),
                tensor=job.tensor.id,
                source=hop.lane.source,
                target=hop.lane.target,
                lane=hop.lane.name,
                start_after=after,
                ready_before=need if last else None,
                wraps=self._wraps(trip),
                codec=job.codec,
            )
            moves.append(move)
            if i:
                drops.append(Drop(job.tensor.id, hop.lane.source, move.id))
            after = move.id

    def _wraps(self, trip: LaneTrip) -> bool:
        if trip.after_update is not None:
            return trip.job.need is None or trip.job.release.position >= trip.job.need.position
        return trip.trigger < -1

    def _unique(self, name: str) -> str:
        return name if name not in self.program.position else f"move {name}"

    def _start(self, start: dict[str, set[str]]) -> tuple[Start, ...]:
        order = [t.name for t in self.machine.tiers]
        known, copies = self.program.starts, []
        missing = False
        for tensor in self.problem.tensors:
            tiers = start.get(tensor.id)
            if not tiers:
                continue
            for tier in (
                sorted(tiers, key=lambda x: (x not in order, x)) if len(tiers) > 1 else tiers
            ):
                asked = tensor.id, tier if tier in order else DEVICE
                missing = missing or tier not in order
                copy = known.get(asked)
                if copy is None:
                    copy = known[asked] = Start(*asked)
                copies.append(copy)
        return tuple(dict.fromkeys(copies) if missing else copies)
