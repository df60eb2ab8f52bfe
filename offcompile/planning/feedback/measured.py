"""One measured step, in the form of a plan's timeline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class MeasuredSpan:
    """Something that ran: a move of the plan by its id, `forward` or `backward`, or a bucket of
    gradients that ranks reduced, with its bytes.

    `lane` is the plan's lane, `compute`, or `reduction`. Times are relative to the step's start.
    The time between forward's end and backward's start, in the caller's code, is cut out of
    everything: a copy in flight meanwhile is shorter by that. A copy may end after the step.
    """

    id: str
    lane: str
    start_ns: int
    end_ns: int
    nbytes: int | None = None


@dataclass(frozen=True)
class MeasuredWait:
    """Compute waited before this op for this move; without an op: at the step's end, or for a
    bucket of gradients."""

    op: str
    move: str
    start_ns: int
    duration_ns: int


@dataclass(frozen=True)
class MeasuredStep:
    """`spans` and `waits` sorted by start; `step_ns` is the time of forward plus backward."""

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
    """A source of measured steps for reports."""

    def median(self) -> MeasuredStep | None:
        """The median of the last recorded steps; None if there is no reliable one."""

    def watch(self, steps: int) -> None:
        """Records this many further steps, if recording is not free and has ended."""
