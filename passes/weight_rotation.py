"""Weights that take turns on the device (weight-offloading paper, hal-03580767, §3 to §5).

A weight may be evicted between two uses; `rotation_selection` chooses the gaps to spend that way
until no run exceeds the budget. The paper's chain of forward and backward ops is a special case:
every weight and state is considered, whatever ops touch it, in steady problems (a ring) or not.

Departures from the paper: the current weight is counted once (eq. 1 and Alg. 1 together count it
twice); Alg. 2, whose feasibility and cut points are not defined, is replaced by the builder.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Machine, Plan, Problem, Tensor
from offcompile.ir.units import round_ns

from .build.contract import Judge
from .build.decisions import Decisions
from .build.gaps import Gap, Gaps, cells_within
from .build.lanes import LaneClock, Routes
from .build.program import Intervals, Program
from .build.required_copies import Residency, plan_residency
from .build.schedule import Builder
from .select.rotation_selection import Need, choose

ROTATING = ("weight", "state")
VARIANTS = ("best", "aware", "spread", "printed", "printed_once", "l2l", "l2l_overlapped")
#: up to this many runs, selections for a smaller budget are tried too
SMALL = 600
#: beyond this many runs, `best` leaves out `aware`, which spends long on breaking near ties
LARGE = 2500


@dataclass(frozen=True)
class WeightRotation:
    """Weight rotation, in the paper's variants and ours.

    - `best` (default): `aware` and `spread`; keeps the better by the judge (without one: `spread`);
    - `aware`: a gap frees nothing while the weight's own write-back or prefetch is in flight;
    - `spread`: `aware`, with higher prices for gaps where the lanes are busier in the step;
    - `printed`: Algorithm 1; `printed_once`: Greedy* of Table 1, which prices each gap as if it
      were the weight's only one (no discount for a second gap of the same value);
    - `l2l`: evicts everything after each use and reloads it only when needed, without overlap;
      `l2l_overlapped`: the same decisions, with prefetches as early as there is room.
    """

    name: ClassVar[str] = "weight_rotation"
    variant: str = "best"
    judge: Judge | None = None

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise ValueError(f"variant {self.variant!r} is not one of {', '.join(VARIANTS)}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        """Adds rotation to the direct accesses, recomputations and updates that `plan` decides."""
        rotation = Rotation(problem, machine, plan)
        if self.variant != "best":
            wishes = [(self.variant, 0.0)]
        elif self.judge is None:
            wishes = [("spread", 0.0)]
        else:
            # a reserve of about one weight helps if several copies are in flight at once
            wishes = [("spread", 0.0)]
            wishes += [("aware", 0.0)] if rotation.n <= LARGE else []
            wishes += [("spread", 1.0), ("aware", 1.0)] if rotation.n <= SMALL else []
        return rotation.best(wishes, self.judge)


class Rotation:
    """The gaps of a problem, and plans that evict weights in some of them."""

    def __init__(self, problem: Problem, machine: Machine, plan: Plan) -> None:
        self.problem, self.machine, self.given = problem, machine, plan
        base = Decisions((), plan.directs, plan.recomputes, plan.updates)
        self.program = Program(problem, base)
        self.clock = LaneClock.unhindered(self.program)
        self.n = len(self.program.runs)
        residency = plan_residency(self.program, base)
        self.need = self._need(residency)

    def best(self, wishes: Iterable[tuple[str, float]], judge: Judge | None) -> Plan:
        """Returns the best plan over several (variant, reserve in median weights)."""
        self._check_floor()
        best: tuple[float, Plan] | None = None
        stuck: Plan | None = None
        tried: set[frozenset[int]] = set()
        for variant, reserve in wishes:
            chosen = self.select(variant, reserve)
            if frozenset(chosen) in tried:
                continue
            tried.add(frozenset(chosen))
            plan = self.build(chosen, judge, lazy=variant == "l2l")
            if judge is None:
                return plan
            timeline = judge(self.problem, self.machine, plan)
            if not timeline.valid:
                stuck = plan
            elif best is None or timeline.cost_us < best[0]:
                best = (timeline.cost_us, plan)
                if timeline.cost_us <= self._compute_us():
                    break
        if best is not None:
            return best[1]
        assert stuck is not None and judge is not None, "every wish gives a plan"
        raise self._stuck(stuck, judge)

    def _stuck(self, plan: Plan, judge: Judge) -> Infeasible:
        """Builds the error for a plan that fits the device but cannot run: often a tier is full."""
        wide = self.machine
        for tier in wide.tiers:
            wide = wide.with_capacity(tier.name, None)
        peaks = judge(self.problem, wide, plan).peak_bytes
        for tier in sorted(self.machine.tiers, key=lambda t: t.name == DEVICE):
            capacity, peak = tier.capacity_bytes, peaks[tier.name]
            if capacity is not None and peak > capacity:
                return Infeasible(
                    f"With weights taking turns the {tier.name} tier must hold {peak:,} bytes and"
                    f" its capacity is {capacity:,}: {peak - capacity:,} are missing.",
                    peak - capacity,
                    f"Raise the capacity of {tier.name} to {peak:,} bytes.",
                )
        detail = judge(self.problem, self.machine, plan).violations[0].detail
        return Infeasible(
            f"Weights cannot take turns within the capacities given: {detail}.",
            None,
            "Raise the capacity of the tier named, or use the policy joint.",
        )

    def select(self, variant: str, reserve: float = 0.0) -> set[int]:
        """Returns the indices of the gaps in which to evict."""
        need = self.need
        sizes = [g.tensor.nbytes for g in need.gaps.gaps]
        if reserve and sizes:
            need = need.with_reserve(int(reserve * statistics.median(sizes)))
        return choose(need, self.clock, variant)

    def build(self, chosen: Iterable[int], judge: Judge | None, lazy: bool = False) -> Plan:
        gaps = self.need.gaps.gaps
        away = tuple(gaps[i].away for i in sorted(chosen))
        given = self.given
        decisions = Decisions(away, given.directs, given.recomputes, given.updates)
        builder = Builder(self.problem, self.machine, decisions)
        return builder.lazy() if lazy else builder.best(judge)

    def _compute_us(self) -> float:
        return sum(round_ns(r.duration_us) for r in self.program.runs if not r.on_host) / 1000

    def _check_floor(self) -> None:
        """Raises if some run exceeds the budget even with an eviction in every gap."""
        need = self.need
        held = need.gaps.held(range(len(need.gaps.gaps)))
        most = max(held, default=0)
        missing = most - need.capacity
        if missing > 0:
            run = self.program.runs[held.index(most)]
            raise Infeasible(
                f"With all weights and states away that can be, {run.name} still needs"
                f" {most:,} bytes on the device and the budget is {need.capacity:,}:"
                f" {missing:,} are missing.",
                missing,
                f"Raise the device budget to {most:,} bytes, or use the policy joint,"
                " which moves activations too.",
            )

    # ---- candidates for eviction -----------------------------------------------------------

    def _need(self, residency: Residency) -> Need:
        waiting = Intervals(self.n)
        for tensor, first, last in residency.held:
            waiting.add(first, last, tensor.nbytes)
        full = [a + b for a, b in zip(self.program.op_bytes, waiting.sums(), strict=True)]
        capacity = self.machine.tier[DEVICE].capacity_bytes
        limit = max(full, default=0) if capacity is None else capacity
        found = list(self._gaps(residency))
        gaps = Gaps([gap for gap, _ in found], full, list(range(self.n)))
        return Need(gaps, tuple(written for _, written in found), limit, self.problem.steady)

    def _gaps(self, residency: Residency) -> Iterator[tuple[Gap, int | None]]:
        """Yields each gap, with the write of its value if only the device has it."""
        routes = _Routes(self.problem, self.machine)
        index, values = 0, dict[tuple[str, int], int]()
        for tensor, first, last in residency.held:
            if tensor.kind not in ROTATING or not tensor.nbytes or tensor.pinned:
                continue
            written = self._written(tensor, first)
            tier = routes.refuge(tensor)
            source = tensor.home if written is None and not self.problem.steady else tier
            if tier is None or source is None:
                continue
            ends = not self.problem.steady and last == self.n
            gap = Gap(
                index=index,
                tensor=tensor,
                after=None if first < 0 else self.program.runs[first].name,
                first=first,
                last=last,
                cells=cells_within(first, last, range(self.n + 1)),
                value=index if written is None else values.setdefault((tensor.id, written), index),
                dirty=written is not None,
                out_us=0.0 if written is None else routes.us(tensor, DEVICE, tier),
                in_us=0.0 if ends else routes.us(tensor, source, DEVICE),
                tier=tier,
                codec=None,
            )
            yield gap, written
            index += 1

    def _written(self, tensor: Tensor, first: int) -> int | None:
        """Returns the write of the value held after `first`; None: another tier has a copy."""
        writes = [a for a in self.program.accesses[tensor.id] if a.writes]
        before = [a for a in writes if a.position <= first]
        if not before and not self.problem.steady:
            return -1 if tensor.home == DEVICE else None
        last = (before or writes)[-1:]
        return last[0].position if last and last[0].tier == DEVICE else None


class _Routes:
    """The tier to which each tensor would be evicted, and its transfer times."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.machine, self.steady = machine, problem.steady
        self.routes = Routes(machine)
        self.room = {t.name: t.capacity_bytes for t in machine.tiers if t.name != DEVICE}
        self.chosen: dict[str, str | None] = {}
        for t in problem.tensors:
            if not problem.steady and t.home is not None:
                self._fill(t.home, t.nbytes)

    def us(self, tensor: Tensor, source: str, target: str) -> float:
        lanes = self.routes.lanes(source, target)
        return sum(self.routes.move_us(tensor, lane, None) for lane in lanes)

    def refuge(self, tensor: Tensor) -> str | None:
        """Returns the fastest tier with room, preferring the host; a full one if none has room."""
        if tensor.id in self.chosen:
            return self.chosen[tensor.id]
        reachable = []
        for tier in self.room:
            try:
                both_us = self.us(tensor, DEVICE, tier) + self.us(tensor, tier, DEVICE)
            except Infeasible:
                continue
            reachable.append((tier != HOST, both_us, tier))
        reachable.sort()
        names = [name for _, _, name in reachable]
        if not self.steady and tensor.home in names:
            found: str | None = tensor.home  # its bytes are already accounted for there
        else:
            fitting = (t for t in names if self._has_room(t, tensor.nbytes))
            found = next(fitting, names[0] if names else None)
            if found is not None:
                self._fill(found, tensor.nbytes)
        self.chosen[tensor.id] = found
        return found

    def _has_room(self, tier: str, nbytes: int) -> bool:
        room = self.room[tier]
        return room is None or room >= nbytes

    def _fill(self, tier: str, nbytes: int) -> None:
        room = self.room.get(tier)
        if room is not None:
            self.room[tier] = room - nbytes
