"""The compute time that the moves of a step cost beside their own: the tolls of the lanes."""

from __future__ import annotations

from .compiled import CompiledPlan, CompiledProblem, Transfer

NS_PER_US = 1000


class Tolls:
    """Rates the moves of plans by the tolls of their lanes."""

    def __init__(self, base: CompiledProblem) -> None:
        self._lanes = base.machine.lanes
        self._charged = any(x.toll_us or x.toll_share or x.bypass_share for x in self._lanes)
        self._in_place = {base.number.tensor[t] for t in base.problem.in_place_ids}
        self._nbytes = [t.nbytes for t in base.problem.tensors]
        codecs = base.machine.codec.values()
        self._codec_bytes_per_us = [0.0, *(c.bytes_per_us for c in codecs)]

    def ns(self, plan: CompiledPlan, makespan_ns: int) -> float:
        """The compute time that a step's moves cost, except while compute is idle."""
        if not self._charged:
            return 0.0
        each_ns, busy_ns, shared_ns = 0.0, 0.0, 0.0
        for move in plan.moves:
            lane = self._lanes[move.lane]
            each_ns += lane.toll_us * NS_PER_US
            work_ns = self._work_ns(move)
            for share, ns in (
                (lane.toll_share, work_ns),
                (lane.bypass_share, move.duration_ns - work_ns),
            ):
                if share:
                    busy_ns += ns
                    shared_ns += share * ns
        if busy_ns:
            idle_ns = makespan_ns - sum(run.duration_ns for run in plan.runs)
            shared_ns *= max(0.0, 1 - max(0, idle_ns) / busy_ns)
        return each_ns + shared_ns

    def _work_ns(self, move: Transfer) -> float:
        """The part of a move's time for which the processor itself works: it copies to and from
        mapped files, and it packs."""
        if move.tensor in self._in_place:
            return move.duration_ns
        if move.codec and (move.from_device or move.to_device):
            us = self._nbytes[move.tensor] / self._codec_bytes_per_us[move.codec]
            return min(us * NS_PER_US, move.duration_ns)
        return 0.0
