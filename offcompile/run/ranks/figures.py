"""States what each rank has to plan one graph with, and what all of them have together.

Ranks whose problems have one structure ask the same question with other figures: each has measured
its own ops and lanes, and has a budget of its own. A plan that is to serve all of them is made for
the least memory and the slowest lanes and ops among them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from offcompile.ir import FORWARD, Codec, Lane, Machine, Problem, SharedLink, Tier
from offcompile.ir.jsonio import machine_from_json, machine_to_json
from offcompile.planning.feedback.corrections import Factors


def structure_of(problem: Problem) -> str:
    """Hash the tensors, ops and accesses of a problem; what was measured of them does not count."""
    tensors = [(t.id, t.nbytes, t.kind, t.home, t.pinned) for t in problem.tensors]
    ops = [
        (o.id, o.phase, o.reads, o.writes, o.host_duration_us is not None, o.recompute)
        for o in problem.ops
    ]
    return _digest([problem.steady, tensors, ops])


@dataclass(frozen=True)
class RankFigures:
    """The figures of one rank, or of all of them together. Structures of equal text have equal
    questions."""

    structure: str
    machine: Machine
    #: bytes that are left to the graph; None: as few as possible
    budget_bytes: int | None
    #: time of all ops of a half
    forward_us: float
    backward_us: float

    @classmethod
    def of(
        cls, problem: Problem, machine: Machine, budget_bytes: int | None, settings: object = None
    ) -> RankFigures:
        """Collect the figures of a rank. `settings`: whatever else a plan depends on."""
        links = [(lane.name, lane.source, lane.target) for lane in machine.lanes]
        codecs = [(codec.name, codec.lossless) for codec in machine.codecs]
        shared = [replace(link, bytes_per_us=0.0) for link in machine.shared]
        shape = [sorted(machine.tier), links, codecs, repr(shared)]
        named = [structure_of(problem), shape, budget_bytes is None, repr(settings)]
        times = dict.fromkeys((True, False), 0.0)
        for op in problem.ops:
            times[op.phase == FORWARD] += op.duration_us
        return cls(_digest(named), machine, budget_bytes, times[True], times[False])

    def over(self, own: RankFigures) -> Factors:
        """Return the times of ops over those of a rank."""
        forward = self.forward_us / own.forward_us if own.forward_us else 1.0
        backward = self.backward_us / own.backward_us if own.backward_us else 1.0
        return Factors(forward, backward)

    def dumps(self) -> str:
        return json.dumps([*self._numbers(), machine_to_json(self.machine)])

    @classmethod
    def loads(cls, text: str) -> RankFigures:
        structure, budget_bytes, forward_us, backward_us, machine = json.loads(text)
        return cls(structure, machine_from_json(machine), budget_bytes, forward_us, backward_us)

    def _numbers(self) -> list[Any]:
        return [self.structure, self.budget_bytes, self.forward_us, self.backward_us]


def least_of(several: Sequence[RankFigures]) -> RankFigures | None:
    """Combine the figures of all ranks; None if their structures differ."""
    first = several[0]
    if any(one.structure != first.structure for one in several):
        return None
    return RankFigures(
        first.structure,
        _slowest([one.machine for one in several]),
        _least(one.budget_bytes for one in several),
        max(one.forward_us for one in several),
        max(one.backward_us for one in several),
    )


def _slowest(machines: Sequence[Machine]) -> Machine:
    """Combine machines with the same tiers, lanes, codecs and shared links."""

    def tier(name: str) -> Tier:
        return Tier(name, _least(m.tier[name].capacity_bytes for m in machines))

    def lane(which: Lane) -> Lane:
        alike = [m.lane[which.name] for m in machines]

        def most(figure: Callable[[Lane], float]) -> float:
            return max(map(figure, alike))

        return replace(
            which,
            bytes_per_us=min(x.bytes_per_us for x in alike),
            latency_us=most(lambda x: x.latency_us),
            toll_us=most(lambda x: x.toll_us),
            toll_share=most(lambda x: x.toll_share),
            bypass_share=most(lambda x: x.bypass_share),
        )

    def codec(which: Codec) -> Codec:
        return replace(which, bytes_per_us=min(m.codec[which.name].bytes_per_us for m in machines))

    def shared(links: tuple[SharedLink, ...]) -> SharedLink:
        return replace(links[0], bytes_per_us=min(link.bytes_per_us for link in links))

    first = machines[0]
    return Machine(
        tuple(tier(t.name) for t in first.tiers),
        tuple(map(lane, first.lanes)),
        tuple(map(codec, first.codecs)),
        tuple(map(shared, zip(*(m.shared for m in machines), strict=True))),
    )


def _least(several: Iterable[int | None]) -> int | None:
    """The least of some limits; None is no limit."""
    return min((one for one in several if one is not None), default=None)


def _digest(said: object) -> str:
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]
