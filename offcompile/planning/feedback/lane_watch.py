"""Compares the lanes' actual rates during training with the rates that the plan assumes.

A lane's rate is measured once, alone. It is lower beside a program that saturates host memory, or
on a disk that has become slow; then another tier may be the better place. FlashNeuron's case study
shows this for host memory: an SSD that is accessed directly, bypassing the host, keeps its rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from offcompile.ir import Lane, Machine
from offcompile.runtime.device.lane_rates import Moved

#: rates that differ by no more than this factor count as equal
MARGIN = 1.3
#: fewer moves are no measurement
LEAST_MOVES = 8
#: number of checks without any move after which a lane has the machine's rate again
FORGOTTEN_AFTER = 2
_NOTHING = Moved(0, 0, 0)


def reached_bytes_per_us(lane: Lane, moved: Moved) -> float | None:
    """The rate without the latency of each move; None if too few moves, or mostly latency."""
    busy_us, starting_us = moved.busy_ns / 1000, moved.moves * lane.latency_us
    if moved.moves < LEAST_MOVES or busy_us <= 2 * starting_us:
        return None
    return moved.nbytes / (busy_us - starting_us)


@dataclass
class LaneWatch:
    """The watch of one graph. `rates`: those its plans assume that differ from the machine's."""

    rates: dict[str, float] = field(default_factory=dict)
    _before: Mapping[str, Moved] | None = None
    _idle: dict[str, int] = field(default_factory=dict)

    def begin(self, totals: Mapping[str, Moved]) -> None:
        """Starts a measurement; ignores earlier moves."""
        self._before = dict(totals)

    def restart(self) -> None:
        """Ignores all moves until the next check, since a new plan runs for the first time."""
        self._before = None

    def look(self, machine: Machine, totals: Mapping[str, Moved]) -> str | None:
        """Compares the lanes' rates since the last check with those that the plan assumes.

        machine: as measured, without `rates`. Updates `rates` for the lanes that changed, and
        returns the changes in words; None if no rate changed by more than `MARGIN`.
        """
        before, self._before = self._before, dict(totals)
        if before is None:
            return None
        said = []
        for lane in machine.lanes:
            moved = _since(before.get(lane.name, _NOTHING), totals.get(lane.name, _NOTHING))
            found = self._rate(lane, moved)
            known = self.rates.get(lane.name, lane.bytes_per_us)
            if found is None or 1 / MARGIN <= found / known <= MARGIN:
                continue
            if moved.moves:
                said.append(f"{lane.name} reaches {found / 1000:.3g} GB/s, not {known / 1000:.3g}")
                self.rates[lane.name] = found
            else:
                said.append(f"{lane.name} has rested, and counts as {found / 1000:.3g} GB/s again")
                del self.rates[lane.name]
        return "; ".join(said) or None

    def _rate(self, lane: Lane, moved: Moved) -> float | None:
        if moved.moves:
            self._idle.pop(lane.name, None)
            return reached_bytes_per_us(lane, moved)
        if lane.name not in self.rates:
            return None
        self._idle[lane.name] = self._idle.get(lane.name, 0) + 1
        if self._idle[lane.name] < FORGOTTEN_AFTER:
            return None
        del self._idle[lane.name]
        return lane.bytes_per_us

    def applied(self, machine: Machine) -> Machine:
        """Returns the machine with the observed rates of its lanes."""
        if not self.rates:
            return machine
        lanes = tuple(
            replace(lane, bytes_per_us=self.rates.get(lane.name, lane.bytes_per_us))
            for lane in machine.lanes
        )
        return replace(machine, lanes=lanes)


def _since(before: Moved, now: Moved) -> Moved:
    """The moves since `before`; a runtime that was closed starts again from 0."""
    if now.moves < before.moves:
        return now
    return Moved(*(b - a for a, b in zip(before, now, strict=True)))
