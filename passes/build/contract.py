"""What a pass is: a frozen dataclass that turns a plan into a better one, or says why not.

A pass only decides. It computes no start times and no memory on its own terms: it hands its
`Decisions` to the one builder (`schedule.build`) and may ask the `judge` (the simulator, handed
in by the planner so that this room stays pure) what a plan is worth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from offcompile.ir import Machine, Plan, Problem, Timeline

#: `judge(problem, machine, plan)` simulates; a plan that cannot go on has `.violations`
Judge = Callable[[Problem, Machine, Plan], Timeline]


class Pass(Protocol):
    """One policy. Its dataclass fields are its options (`NAME:key=value,…` on the command line).

    A pass that declares a field `judge: Judge | None = None` is given the simulator.
    """

    name: ClassVar[str]

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        """The plan after this pass. Raises `Infeasible` when it cannot be made to fit."""
        ...
