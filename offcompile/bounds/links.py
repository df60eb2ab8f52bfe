"""The time that shared links take for moves, and for operands that ops access in place."""

from __future__ import annotations

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
        names = [x.name for x in self.machine.lanes]
        return link.lane_shares[names.index(lane)] / FULL

    def slowed(self, lane: str) -> float:
        """The factor by which a link that is slower than the lane makes its moves longer."""
        return max((self.share(link, lane) for link in self.figures), default=1.0)

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

    def beside(self, op: int, tensor: str, lane: Lane) -> float:
        """The time in which the lane stands still because the op accesses the operand in place.

        Counts links that a move over the lane takes whole; other links may carry both at once.
        """
        whole = (link for link in self.figures if self.share(link, lane.name) >= 1.0)
        return max((self.access_ns(link, op, tensor) for link in whole), default=0.0)
