"""The contract of a pass: a frozen dataclass that improves a plan, or raises `Infeasible`.

A pass only decides. It computes no start times and no memory itself: it hands its `Decisions` to
the builder (`schedule.build`) and may ask the `judge` (the simulator, passed in by the planner so
that this package stays pure) for the cost of a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Protocol

from offcompile.ir import Machine, Plan, Problem, Timeline

#: `judge(problem, machine, plan)` simulates; the result has `.violations` if the plan cannot run
Judge = Callable[[Problem, Machine, Plan], Timeline]


class Pass(Protocol):
    """One policy. Its dataclass fields are its options (`NAME:key=value,…` on the command line).

    A pass that declares a field `judge: Judge | None = None` receives the simulator.
    """

    name: ClassVar[str]

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        """Returns the plan after this pass. Raises `Infeasible` if it cannot be made to fit."""
        ...
