"""One step as it was measured, in the shape of a plan's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class MeasuredSpan:
    """Something that ran: a move of the plan by its id, or `forward` or `backward`.

    `lane` is the plan's lane, or `compute`. Times are since the step's start. What passes between
    forward's end and backward's start, in the caller's code, is cut out of everything: a copy that
    ran meanwhile is shorter by that. A copy may end after the step.
    """

    id: str
    lane: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class MeasuredWait:
    """Compute stood still before this op for this move; without an op: at the step's end."""

    op: str
    move: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True)
class MeasuredStep:
    """`spans` and `waits` by their start; `step_ns` is forward and backward together."""

    spans: tuple[MeasuredSpan, ...]
    waits: tuple[MeasuredWait, ...]
    step_ns: int

    @property
    def waiting_ns(self) -> int:
        return sum(wait.duration_ns for wait in self.waits)

    @property
    def compute_ns(self) -> int:
        return self.step_ns - self.waiting_ns


class Steps(Protocol):
    """Where a report finds what was measured."""

    def median(self) -> MeasuredStep | None:
        """The median of the last steps that were recorded; None: there is none to be sure of."""

    def watch(self, steps: int) -> None:
        """Record so many steps from now on, where recording is not free and has ended."""
