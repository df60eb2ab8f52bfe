"""Memory of a plan at the sizes of one call, which may differ from the planned ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from offcompile.ir import DEVICE, Plan, Problem

from .order import ProgramStep
from .replay import worst_case


class Footprint(NamedTuple):
    """Memory of a step, in bytes: on the device, unless said otherwise."""

    #: held when the step begins
    standing_bytes: int = 0
    #: peak, including the runtime's reserve
    peak_bytes: int = 0
    #: left by forward for backward, not counting weights and inputs
    kept_bytes: int = 0
    #: peak of the host tier
    host_bytes: int = 0


@dataclass(eq=False)
class NeedsBySize:
    """The needs of one plan in one order. `planned` applies if no size can change."""

    planned: Footprint
    #: the step at other sizes; None if sizes cannot change
    problem_at: Callable[[tuple[int, ...]], Problem] | None
    plan: Plan
    steps: tuple[ProgramStep, ...]
    reserve_bytes: int
    #: tensors that forward leaves on the device
    kept: frozenset[str]
    #: bytes of all tensors of the step
    total_bytes: int
    known: dict[tuple[int, ...], Footprint] = field(default_factory=dict)
    #: the needs of a plan that was passed over for this one, and never compiled
    passed_over: NeedsBySize | None = None

    def at(self, sizes: tuple[int, ...]) -> Footprint:
        """The needs for these values of the graph's symbols, in order."""
        if not sizes or self.problem_at is None:
            return self.planned
        found = self.known.get(sizes)
        if found is None:
            problem = self.problem_at(sizes)
            found = self.known[sizes] = Footprint(
                standing_in(problem),
                worst_case(problem, self.plan, self.steps) + self.reserve_bytes,
                bytes_of(problem, self.kept),
                # moves to the host grow with the rest of the step
                self.planned.host_bytes * total_bytes(problem) // max(1, self.total_bytes),
            )
        return found


def standing_in(problem: Problem) -> int:
    return sum(t.nbytes for t in problem.tensors if t.home == DEVICE)


def bytes_of(problem: Problem, tensors: frozenset[str]) -> int:
    return sum(t.nbytes for t in problem.tensors if t.id in tensors)


def total_bytes(problem: Problem) -> int:
    return sum(t.nbytes for t in problem.tensors)
