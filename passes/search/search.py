"""Local search over program variants and covers, judged by the simulator.

A state is a program variant and the set of gaps in which tensors are evicted. A neighbour differs
in the choices of its variant, or is made by ruin and repair: bring a few tensors back to the device
near a stall (or anywhere), forbid their eviction for the moment, evict others instead until
everything fits, then bring back those that need not be away any more. The search is seeded and
counted in evaluations, so a run is exactly reproducible; the clock only cuts it off.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from offcompile.ir import Direct, Infeasible, Machine, Plan, Problem, Timeline
from offcompile.passes.build.contract import Judge
from offcompile.passes.build.decisions import Decisions
from offcompile.passes.build.gaps import Gap
from offcompile.passes.build.lanes import LaneClock
from offcompile.passes.build.schedule import Builder
from offcompile.passes.select.gap_set import GapSet, Prices

from .program_variant import Choices, ProgramVariant, hostable, may_access

#: if only the compute time taken by moves is left to gain: further plans tried, and the relative
#: gain that resets this count
TOLL_PATIENCE, WORTH_WAITING = 40, 0.001


@dataclass
class SearchState:
    variant: ProgramVariant
    cover: GapSet
    plan: Plan
    timeline: Timeline
    us: float
    #: bytes that the builder was told to keep free: this changes the triggers
    reserve: float = 0.0

    @property
    def cost(self) -> tuple[float, float]:
        return (self.us, self.cover.traffic_us())


class Search:
    """State shared by all searches on one problem: judge, budget, best plan so far."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        judge: Judge,
        evaluations: int,
        deadline: float,
        floor_us: float,
        progress: Callable[[str], None] | None = None,
        close: float = 0.0,
    ) -> None:
        """close: a plan within this fraction above the bound is not worth improving."""
        self.problem, self.machine, self.judge = problem, machine, judge
        self.left, self.deadline, self.floor_us = evaluations, deadline, floor_us
        self.close = close
        self.rng = random.Random(20240229)
        self.best_plan: Plan | None = None
        self.best_us = math.inf
        #: True if no plan can be faster than the best one, except with moves that slow compute less
        self.at_floor = False
        self.patience = 0
        self.progress = progress
        self.departures = departures(problem)

    # ---- bookkeeping ---------------------------------------------------------------------

    @property
    def settled(self) -> bool:
        """True if there is nothing left to gain, or no time left."""
        if self.best_us <= self._near_floor_us or time.thread_time() > self.deadline:
            return True
        return self.at_floor and self.patience <= 0

    @property
    def _near_floor_us(self) -> float:
        """The bound plus a tolerance, since the bound keeps a margin below the time it proves."""
        return self.floor_us + max(0.005, max(1e-5, self.close) * self.floor_us)

    @property
    def done(self) -> bool:
        return self.left <= 0 or self.settled

    def offer(self, plan: Plan, timeline: Timeline) -> None:
        """Records a plan if it is the best so far (fewer moves break a tie)."""
        if not timeline.valid:
            return
        us = timeline.cost_us
        better = us < self.best_us or (
            us == self.best_us
            and self.best_plan is not None
            and len(plan.moves) < len(self.best_plan.moves)
        )
        if better:
            if self.progress is not None and us < self.best_us:
                self.progress(f"best {us / 1000:,.3f} ms")
            if us < self.best_us * (1 - WORTH_WAITING):
                self.patience = TOLL_PATIENCE
            self.at_floor = timeline.makespan_us <= self._near_floor_us
            self.best_plan, self.best_us = plan, us

    def evaluate(
        self,
        variant: ProgramVariant,
        cover: GapSet,
        clock: LaneClock | None = None,
        rounds: int = 1,
        reserve: float = 0.0,
    ) -> SearchState | None:
        """Builds and judges a plan, then rebuilds it with the simulated times while that helps."""
        try:
            decisions = self._decisions(variant, cover)
            builder = Builder(self.problem, self.machine, decisions, program=variant.program)
        except Infeasible:
            return None
        builder.reserve(reserve)
        # counted once: placing triggers again takes little beside the rest, and gains more
        self.left -= 1
        self.patience -= 1
        best: SearchState | None = None
        clock = clock or LaneClock.unhindered(builder.program)
        for _ in range(rounds + 1):
            plan = builder.at(clock)
            timeline = self.judge(self.problem, self.machine, plan)
            if not timeline.valid:
                break
            self.offer(plan, timeline)
            if best is not None and timeline.cost_us >= best.us:
                break
            best = SearchState(variant, cover, plan, timeline, timeline.cost_us, reserve)
            if not timeline.stalls or self.done:
                break
            clock = LaneClock.simulated(builder.program, timeline)
        return best

    def _decisions(self, variant: ProgramVariant, cover: GapSet) -> Decisions:
        return variant.decisions(cover)

    # ---- the walk ------------------------------------------------------------------------

    def walk(self, state: SearchState, evaluations: int) -> SearchState:
        """Anneals from `state`; returns the best state visited."""
        best = state
        start, stop = self.left, self.left - evaluations
        while self.left > stop and not self.done:
            spent = (start - self.left) / max(1, evaluations)
            heat = 0.01 * best.us * (1 - spent) ** 2
            made = self._neighbour(state)
            if made is None:
                self.left -= 1
                continue
            variant, cover = made
            same = variant is state.variant
            clock = LaneClock.simulated(variant.program, state.timeline) if same else None
            reserve = self._reserve(state)
            found = self.evaluate(variant, cover, clock, rounds=0, reserve=reserve)
            if found is None:
                continue
            worse = found.us - state.us
            if worse == 0:
                accept = found.cost <= state.cost or self.rng.random() < 0.2
            else:
                accept = worse < 0 or (heat > 0 and self.rng.random() < math.exp(-worse / heat))
            if accept:
                state = found
                if found.cost < best.cost:
                    best = found
        return best

    def _neighbour(self, state: SearchState) -> tuple[ProgramVariant, GapSet] | None:
        draw = self.rng.random()
        if draw < 0.12:
            changed = self._other_frame(state)
            if changed is not None:
                return changed
        at = self._stalled_position(state)
        cover = state.cover.copy()
        if draw < 0.30:
            self._make_room(state, cover, at)
        else:
            self._ruin(state, cover, at, count=1 + int(self.rng.random() ** 2 * 4))
        return state.variant, cover

    def _reserve(self, state: SearchState) -> float:
        if self.rng.random() < 0.8 or not state.variant.gaps.gaps:
            return state.reserve
        if self.rng.random() < 0.4:
            return 0.0
        return self.rng.random() * self.rng.choice(state.variant.gaps.gaps).tensor.nbytes

    def _prices(self, state: SearchState) -> Prices:
        """Returns higher prices for busier lanes, with a little noise to vary the choices."""
        gaps = state.variant.gaps.gaps
        out = sum(g.out_us for g in map(gaps.__getitem__, state.cover.away) if g.dirty)
        back = sum(g.in_us for g in map(gaps.__getitem__, state.cover.away))
        top = max(out, back, 1e-9)
        r = self.rng
        return Prices(0.2 + out / top * r.uniform(0.5, 1.5), 0.2 + back / top * r.uniform(0.5, 1.5))

    def _stalled_position(self, state: SearchState) -> int | None:
        stalls = [s for s in state.timeline.stalls if s.op in state.variant.program.position]
        if not stalls or self.rng.random() < 0.15:
            return None
        stall = self.rng.choices(stalls, weights=[s.duration_ns for s in stalls])[0]
        return state.variant.program.position[stall.op]

    def _ruin(self, state: SearchState, cover: GapSet, at: int | None, count: int) -> None:
        gaps, n, rng = state.variant.gaps.gaps, len(state.variant.program.runs), self.rng
        away = sorted(cover.away)
        if not away:
            return

        def nearness(i: int) -> float:
            if at is None:
                return 1.0
            return 1.0 / (1.0 + ((at - gaps[i].last) % n) / max(4.0, n / 8))

        weights = [(gaps[i].in_us + gaps[i].out_us + 1e-9) * nearness(i) ** 2 for i in away]
        gone = set(rng.choices(away, weights=weights, k=count))
        for i in sorted(gone):
            cover.remove(i)
        prices = self._prices(state)
        capacity = state.variant.capacity
        tight = self._tightened(state, at) if rng.random() < 0.3 else capacity
        noisy = self._noise()
        ok = cover.repair(tight, prices, noisy, frozenset(gone))
        if not ok:
            cover.repair(capacity, prices, noisy)
        if rng.random() < 0.7:
            cover.prune(capacity, prices, rng)

    def _make_room(self, state: SearchState, cover: GapSet, at: int | None) -> None:
        """Evicts one more tensor over the runs before a stall, so that loads can start earlier."""
        n, rng = len(state.variant.program.runs), self.rng
        at = rng.randrange(n) if at is None else at
        over = (at - 1 - int(rng.random() ** 2 * n / 2)) % n
        gaps = state.variant.gaps
        others = [i for i in gaps.at(gaps.cell_of[over]) if i not in cover.away]
        if others:
            cover.add(rng.choice(others))

    def _noise(self) -> Callable[[Gap], float]:
        rng = random.Random(self.rng.random())
        return lambda gap: rng.uniform(0.5, 1.5)

    def _tightened(self, state: SearchState, at: int | None) -> list[float]:
        """Returns the capacity per cell, with room kept free over some runs before a stall."""
        n, rng, capacity = len(state.variant.program.runs), self.rng, state.variant.capacity
        gaps = state.variant.gaps
        spare = rng.choice(gaps.gaps).tensor.nbytes if gaps.gaps else 0
        limit = [capacity] * len(gaps.full)
        at = rng.randrange(n) if at is None else at
        for k in range(1 + int(rng.random() * n / 4)):
            limit[gaps.cell_of[(at - 1 - k) % n]] = capacity - spare
        return limit

    def _other_frame(self, state: SearchState) -> tuple[ProgramVariant, GapSet] | None:
        choices = change_choice(self.departures, state.variant.choices, self.rng, state.timeline)
        if choices is None:
            return None
        variant, cover = state.variant.with_choices(choices, state.cover)
        try:
            variant.check_floor()
        except Infeasible:
            return None
        prices = self._prices(state)
        if not cover.repair(variant.capacity, prices):
            return None
        cover.prune(variant.capacity, prices, self.rng)
        return variant, cover


def departures(problem: Problem) -> dict[str, list[tuple[str, str]]]:
    """Returns every possible departure from plain execution: by kind, (op or weight, operand)."""
    first_reader: dict[str, list[int]] = {}
    for i, op in enumerate(problem.ops):
        for t in op.reads:
            first_reader.setdefault(t, []).append(i)
    recomputes = []
    for i, op in enumerate(problem.ops):
        if not op.recompute:
            continue
        for t in op.writes:
            readers = [j for j in first_reader.get(t, ()) if j > i]
            for before, after in pairwise(readers):
                if after - before > 1:
                    recomputes.append((op.id, problem.ops[after].id))
    return {
        "direct": [(op.id, t) for op in problem.ops for t in may_access(problem, op)],
        "recompute": list(dict.fromkeys(recomputes)),
        "hosted": [(weight, ops[0]) for weight, ops in hostable(problem).items()],
    }


def change_choice(
    possible: dict[str, list[tuple[str, str]]],
    choices: Choices,
    rng: random.Random,
    timeline: Timeline,
) -> Choices | None:
    """Returns the choices with one possible departure flipped, near a stall if there is one."""
    kinds = [k for k, v in possible.items() if v]
    if not kinds:
        return None
    kind = rng.choice(kinds)
    pick = rng.choice(possible[kind])
    stalled = {s.op for s in timeline.stalls}
    if kind == "direct" and stalled and rng.random() < 0.6:
        near = [d for d in possible[kind] if d[0] in stalled]
        pick = rng.choice(near) if near else pick
    if kind == "direct":
        return Choices(choices.directs ^ {pick}, choices.recomputes, choices.hosted)
    if kind == "recompute":
        return Choices(choices.directs, choices.recomputes ^ {pick}, choices.hosted)
    return Choices(choices.directs, choices.recomputes, choices.hosted ^ {pick[0]})


def choices_of(plan: Plan) -> Choices:
    """Returns the choices that a plan of any policy makes."""
    return Choices(
        frozenset((d.op, d.tensor) for d in plan.directs if isinstance(d, Direct)),
        frozenset((r.op, r.before) for r in plan.recomputes),
        frozenset(u.weight for u in plan.updates if u.where == "host"),
    )
