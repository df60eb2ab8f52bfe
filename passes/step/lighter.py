"""Ways of a graph to save less for its backward, and recorded steps in which it does.

Ops that take little time run again in backward, so that their results need not travel between
graphs. A graph by itself cannot tell if that pays: moves cost nothing as long as there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .record import Execution, Measured, RecordedStep, TensorKey


@dataclass(frozen=True)
class Lighter:
    """A way to save less: the price at which a plan by `turnover` comes to it, the tensors that
    forward still saves, what running ops again adds to backward, and how much more it holds."""

    ns_per_byte: float
    saved: tuple[tuple[str, int], ...]
    added_us: float
    more_bytes: int

    @property
    def saved_bytes(self) -> int:
        return sum(nbytes for _, nbytes in self.saved)


def lightened(step: RecordedStep, ways: Mapping[int, Lighter]) -> RecordedStep:
    """The step if the forwards at these positions saved less."""
    runs, measured = list(step.executions), list(step.measured)
    for at, way in ways.items():
        runs[at] = replace(runs[at], saved=way.saved)
        instead = tuple(TensorKey(at, number) for number in range(len(way.saved)))
        for reader in readers(step, at):
            runs[reader] = replace(runs[reader], read=_without(runs[reader], at) + instead)
            took_us, room_bytes = measured[reader]
            measured[reader] = Measured(took_us + way.added_us, room_bytes - way.more_bytes)
    return replace(step, executions=tuple(runs), measured=tuple(measured))


def readers(step: RecordedStep, at: int) -> Sequence[int]:
    """The executions that read tensors which the one at this position saved."""
    runs = step.executions
    return [p for p, run in enumerate(runs) if any(key.born == at for key in run.read)]


def _without(run: Execution, at: int) -> tuple[TensorKey, ...]:
    return tuple(key for key in run.read if key.born != at)
