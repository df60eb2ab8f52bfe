"""What a plan takes of the device at the sizes of one call; it may have been made for others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from offcompile.ir import DEVICE, Plan, Problem

from .order import ProgramStep
from .replay import worst_case


class Footprint(NamedTuple):
    """Bytes on the device."""

    #: when the step begins
    standing_bytes: int = 0
    #: at most, with the runtime's reserve
    peak_bytes: int = 0
    #: what forward leaves there for backward; weights and inputs not counted
    kept_bytes: int = 0


@dataclass(eq=False)
class NeedsBySize:
    """Of one plan in one order. `planned` holds where no size can change."""

    planned: Footprint
    #: the step at other sizes; None: there are none
    problem_at: Callable[[tuple[int, ...]], Problem] | None
    plan: Plan
    steps: tuple[ProgramStep, ...]
    reserve_bytes: int
    #: the tensors that forward leaves
    kept: frozenset[str]
    known: dict[tuple[int, ...], Footprint] = field(default_factory=dict)

    def at(self, sizes: tuple[int, ...]) -> Footprint:
        """For the values of the graph's symbols, in order."""
        if not sizes or self.problem_at is None:
            return self.planned
        found = self.known.get(sizes)
        if found is None:
            problem = self.problem_at(sizes)
            found = self.known[sizes] = Footprint(
                standing_in(problem),
                worst_case(problem, self.plan, self.steps) + self.reserve_bytes,
                bytes_of(problem, self.kept),
            )
        return found


def standing_in(problem: Problem) -> int:
    return sum(t.nbytes for t in problem.tensors if t.home == DEVICE)


def bytes_of(problem: Problem, tensors: frozenset[str]) -> int:
    return sum(t.nbytes for t in problem.tensors if t.id in tensors)
