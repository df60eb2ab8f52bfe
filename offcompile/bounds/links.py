"""The time that shared links take for moves, and for operands that ops access in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from offcompile.ir import Lane, Machine, Problem
from offcompile.ir.units import round_ns
from offcompile.simulate.links import FULL, LinkFigures


@dataclass(frozen=True)
class Links:
    """The shared links of one machine. Host updates are left out: they may overload a link."""

    problem: Problem
    machine: Machine

    @cached_property
    def figures(self) -> tuple[LinkFigures, ...]:
        return tuple(LinkFigures.of(link, self.machine.lanes) for link in self.machine.shared)

    def share(self, link: LinkFigures, lane: str) -> float:
        """The part of the link's rate that a move over the lane takes at full speed."""
        return link.lane_shares[self._number[lane]] / FULL

    @cached_property
    def _number(self) -> Mapping[str, int]:
        return {lane.name: i for i, lane in enumerate(self.machine.lanes)}

    @cached_property
    def slowed(self) -> Mapping[str, float]:
        """Lane → the factor by which links slower than it make its moves longer; 1: none does."""
        return {
            lane.name: max([1.0, *(self.share(link, lane.name) for link in self.figures)])
            for lane in self.machine.lanes
        }

    def access_ns(self, link: LinkFigures, op: int, tensor: str) -> float:
        """The least time that the link takes for one operand that the op accesses in place.

        An op takes no more than the whole link while it runs. So each operand counts for no more
        than what its access adds to the op, and an equal part of the op alone.
        """
        run, nbytes = self.problem.ops[op], [self.problem.tensor[tensor].nbytes]
        read = [0] if tensor in run.reads else []
        written = [0] if tensor in run.writes else []
        whole = float(link.accesses_ns(read, written, nbytes, update=False))
        alone = round_ns(run.duration_us)
        added = {t: round_ns(us) - alone for t, us in run.direct.items()}
        if min(added.values(), default=0) < 0:
            return 0.0  # the op may be shorter than its parts
        return min(whole, added.get(tensor, 0) + alone / max(1, len(added)))

    @cached_property
    def _taken_whole(self) -> Mapping[str, tuple[LinkFigures, ...]]:
        return {
            lane.name: tuple(x for x in self.figures if self.share(x, lane.name) >= 1.0)
            for lane in self.machine.lanes
        }

    def beside(self, op: int, tensor: str, lane: Lane) -> float:
        """The time in which the lane stands still because the op accesses the operand in place.

        Counts links that a move over the lane takes whole; other links may carry both at once.
        """
        taken = self._taken_whole[lane.name]
        return max((self.access_ns(link, op, tensor) for link in taken), default=0.0)
