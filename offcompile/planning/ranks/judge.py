"""Judges plans by the step with its collectives beside it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from offcompile.ir import DEVICE, Machine, Op, Plan, Problem, Start, Timeline
from offcompile.simulate import Simulator

from .beside import Collective, Ring, beside

#: collectives that differ between plans, for which a simulator is kept
MOST_KNOWN = 8


class CollectivesBeside(ABC):
    """The collectives of a step, which plans change little: an op that runs again needs its weights
    again."""

    @property
    @abstractmethod
    def ring(self) -> Ring:
        """The way to the next rank."""

    @abstractmethod
    def collectives(self, problem: Problem, plan: Plan) -> Sequence[Collective]:
        """List the collectives of a plan. `problem`: the step, maybe with its ops merged."""

    def digest(self, problem: Problem) -> str:
        """Hash what plans of the problem are judged by."""
        said = f"{self.ring} {list(self.collectives(problem, Plan()))}"
        return hashlib.sha256(said.encode()).hexdigest()


class StepJudge:
    """Times plans of one problem, which is not steady, with the collectives beside them."""

    def __init__(self, problem: Problem, machine: Machine, rest: CollectivesBeside) -> None:
        self.problem, self.machine, self.rest = problem, machine, rest
        self._alone = Simulator(problem, machine)
        self._listed: dict[object, Sequence[Collective]] = {}
        self._known: dict[object, Simulator] = {}

    def __call__(self, plan: Plan) -> Timeline:
        """Time the step. A plan that does not run without collectives has violations, too."""
        choices = plan.recomputes, plan.updates
        if choices not in self._listed:
            if len(self._listed) >= MOST_KNOWN:
                del self._listed[next(iter(self._listed))]
            self._listed[choices] = self.rest.collectives(self.problem, plan)
        some = self._listed[choices]
        if not some:
            return self._alone.run(plan, record=False)
        step, machine, asked = beside(self.problem, self.machine, plan, self.rest.ring, some)
        room = machine.tier[DEVICE].capacity_bytes
        if room != self.machine.tier[DEVICE].capacity_bytes:
            alone = self._alone.run(plan, record=False)
            if not alone.valid:
                return alone
        alike = tuple(some), room
        simulator = self._known.pop(alike, None) or Simulator(step, machine)
        self._known[alike] = simulator
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]
        return simulator.run(asked, record=False)

    def least_us(self) -> float:
        """The time of the step with nothing moved, on a device without limits: hardly any plan is
        faster. 0 if that is not known."""
        problem = _at_home(self.problem)
        wide = self.machine.with_capacity(DEVICE, None)
        plan = Plan(start=tuple(Start(t.id, DEVICE) for t in problem.tensors if t.home is not None))
        timeline = StepJudge(problem, wide, self.rest)(plan)
        return timeline.makespan_us if timeline.valid else 0.0


def _at_home(problem: Problem) -> Problem:
    """The step with all tensors on the device, each op as short as it can be, and without updates
    that the host may make."""

    def short(op: Op) -> Op:
        saved = sum(min(0.0, us - op.duration_us) for us in op.direct.values())
        return replace(op, duration_us=max(0.0, op.duration_us + saved), direct={})

    ops = tuple(short(op) for op in problem.ops if op.host_duration_us is None)
    tensors = tuple(t if t.home is None else replace(t, home=DEVICE) for t in problem.tensors)
    return replace(problem, tensors=tensors, ops=ops)
