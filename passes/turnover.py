"""Every activation that forward saves leaves until backward wants it: the worst case of a plan.

For a graph among others, of which nobody knows when it is planned how much room they leave: its
forward and its backward lie apart, and between them nothing of it need be on the device. What is
moved in the end is decided while running, by what there is room for (the runtime's keeper).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from offcompile.ir import Machine, Plan, Problem

from .contract import Judge
from .decisions import Away
from .frame import Frame, Mode
from .schedule import build


@dataclass(frozen=True)
class Turnover:
    """All that lives from forward to backward is away in between."""

    name: ClassVar[str] = "turnover"
    judge: Judge | None = None

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        decisions = Mode().decisions(problem, _crossing(problem, machine))
        return build(problem, machine, decisions, self.judge)


def _crossing(problem: Problem, machine: Machine) -> tuple[Away, ...]:
    """The gaps of activations between their last use in forward and their first in backward."""
    backward = (i for i, op in enumerate(problem.ops) if op.phase == "backward")
    turn = next(backward, len(problem.ops))
    gaps = Frame(problem, machine, Mode()).gaps.gaps
    return tuple(
        gap.away for gap in gaps if gap.tensor.kind == "activation" and gap.first < turn <= gap.last
    )
