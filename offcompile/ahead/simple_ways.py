"""Evaluates simple ways to fit a step, on the same problem that the planner gets.

A plan that is slower than one of them is a bug. All are judged by the same simulator, and in their
favour if in doubt: no budget is reserved for a runtime, gradients are freed as soon as an update
has read them, and host updates reach the rate that plans assume.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from offcompile.ir import DEVICE, HOST, Infeasible, Lane, Machine, Op, Problem
from offcompile.ir.units import move_ns
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.passes.build.schedule import build
from offcompile.passes.build.time_left import TimeIsUp, TimeLeft, timed_by
from offcompile.passes.registry import POLICIES
from offcompile.planning.planner import plan_problem
from offcompile.report.simple_way import SimpleWay
from offcompile.simulate import Simulator

from .simple_reruns import Rerunning, Reruns

NS_PER_US = 1000
CHECKPOINTED = "every block checkpointed"
BUDGETED = "torch's activation_memory_budget"
OFFLOADED = "ZeRO-Offload"
BOTH = "ZeRO-Offload, every block checkpointed"
#: our own policy, which tries the others; not compared
OURS = "joint"


@dataclass(frozen=True, eq=False)
class SimpleWays:
    """The simple ways for one step.

    at_home: the step with all weights, gradients and states on the device. host_factor: duration of
    an update on the host relative to the device; None: the host updates nothing.
    labels: op → the module that it belongs to.
    """

    at_home: Problem
    machine: Machine
    budget_bytes: int
    labels: Mapping[str, str]
    host_factor: float | None = None

    def all(self) -> Iterator[SimpleWay]:
        """Evaluate recomputation alone, then ZeRO-Offload if there is an optimizer."""
        here = Reruns(self.at_home)
        yield self._recomputed(CHECKPOINTED, *here.blocks_again(self.labels, self.budget_bytes))
        yield self._recomputed(BUDGETED, here, here.budgeted(self.budget_bytes))
        if self.host_factor is None or not self.updates or self._lane_back is None:
            return
        beside = self.without_updates
        there = Reruns(beside, leaving_gradients(beside))
        yield self._offloaded(OFFLOADED, there, there.of(frozenset()))
        yield self._offloaded(BOTH, *there.blocks_again(self.labels, self.budget_bytes))

    @property
    def _lane_back(self) -> Lane | None:
        return next(iter(self.machine.lanes_between(HOST, DEVICE)), None)

    @property
    def updates(self) -> list[Op]:
        return [op for op in self.at_home.ops if op.phase == "update"]

    @property
    def without_updates(self) -> Problem:
        """Forward and backward with weights on the device, states on the host, and gradients that
        may leave for the host."""
        tensors = tuple(
            replace(t, home=HOST)
            if t.kind == "state"
            else replace(t, pinned=False)
            if t.kind == "gradient"
            else t
            for t in self.at_home.tensors
        )
        ops = tuple(op for op in self.at_home.ops if op.phase != "update")
        return replace(self.at_home, tensors=tensors, ops=ops)

    def _recomputed(self, name: str, reruns: Reruns, chosen: Rerunning) -> SimpleWay:
        try:
            step_us = self._judged_us(name, reruns.problem, reruns.decisions(chosen.reruns), chosen)
        except Infeasible as error:
            return SimpleWay(name, None, chosen.peak_bytes, reason=error.reason)
        return SimpleWay(name, step_us, chosen.peak_bytes, self._missing(chosen.peak_bytes))

    def _offloaded(self, name: str, reruns: Reruns, chosen: Rerunning) -> SimpleWay:
        """Evaluate ZeRO-Offload: gradients leave while backward runs. Then the host updates one
        parameter after the other, and copies each back while it updates the next."""
        found = self._recomputed(name, reruns, chosen)
        lane, factor = self._lane_back, self.host_factor
        if found.step_us is None or lane is None or factor is None:
            return found
        now = back = round(NS_PER_US * found.step_us)
        for op in self.updates:
            now += round(NS_PER_US * op.duration_us * factor)
            back = max(now, back) + _weights_ns(self.at_home, op, lane)
        return replace(found, step_us=back / NS_PER_US)

    def _judged_us(
        self, name: str, problem: Problem, decisions: Decisions, chosen: Rerunning
    ) -> float:
        """Simulate the step under the budget, or under its own peak if that is larger."""
        capacity = max(self.budget_bytes, chosen.peak_bytes)
        machine = self.machine.with_capacity(DEVICE, capacity)
        timeline = Simulator(problem, machine).run(build(problem, machine, decisions), record=False)
        if timeline.violations:
            reason = f"{name} cannot go on: {timeline.violations[0].detail}."
            raise Infeasible(reason, None, "Raise the capacity of the tier named.")
        return timeline.makespan_us

    def _missing(self, peak_bytes: int) -> int:
        return max(0, peak_bytes - self.budget_bytes)


def _weights_ns(problem: Problem, op: Op, lane: Lane) -> int:
    sizes = [problem.tensor[t].nbytes for t in op.writes if problem.tensor[t].kind == "weight"]
    return sum(move_ns(n, lane.bytes_per_us, lane.latency_us) for n in sizes)


def leaving_gradients(problem: Problem) -> tuple[Away, ...]:
    """Make each gradient leave after the last op that touches it."""
    last = {t: op.id for op in problem.ops for t in op.operands}
    gradients = (t.id for t in problem.tensors if t.kind == "gradient" and t.id in last)
    return tuple(Away(g, last[g]) for g in gradients)


def policy_ways(problems: list[Problem], machine: Machine, seconds: float) -> Iterator[SimpleWay]:
    """Plan with each published policy, for `seconds` per problem (weights on the device, weights on
    the host); yields the best of each policy."""
    for policy in POLICIES:
        if policy == OURS:
            continue
        tried = [_planned(policy, problem, machine, seconds) for problem in problems]
        yield min(tried, key=lambda w: (w.step_us is None, w.step_us or w.missing_bytes))


def _planned(policy: str, problem: Problem, machine: Machine, seconds: float) -> SimpleWay:
    deadline = time.monotonic() + seconds

    def clock() -> TimeLeft:
        late = time.monotonic() - deadline
        return TimeLeft.ENOUGH if late < 0 else TimeLeft.SHORT if late < seconds else TimeLeft.OVER

    try:
        with timed_by(clock):
            result = plan_problem(problem, machine, policy, seconds)
    except Infeasible as error:
        return SimpleWay(policy, None, None, error.needed_bytes or 0, error.reason)
    except TimeIsUp:
        return SimpleWay(policy, None, None, reason=f"no plan in {2 * seconds:.0f} s")
    return SimpleWay(policy, result.makespan_us, result.timeline.peak_bytes[DEVICE])
