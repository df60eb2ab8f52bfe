"""The compute time that the moves of a step cost beside their own: the tolls of the lanes."""

from __future__ import annotations

from .compiled import CompiledPlan, CompiledProblem

NS_PER_US = 1000


class Tolls:
    """Rates the moves of plans by the tolls of their lanes."""

    def __init__(self, base: CompiledProblem) -> None:
        self._lanes = base.machine.lanes
        self._charged = any(lane.toll_us or lane.toll_share for lane in self._lanes)
        self._in_place = {base.number.tensor[t] for t in base.problem.in_place_ids}

    def ns(self, plan: CompiledPlan, makespan_ns: int) -> float:
        """The compute time that a step's moves cost, except while compute is idle."""
        if not self._charged:
            return 0.0
        each_ns, copied_ns, shared_ns = 0.0, 0, 0.0
        for move in plan.moves:
            lane = self._lanes[move.lane]
            each_ns += lane.toll_us * NS_PER_US
            if lane.toll_share and move.tensor in self._in_place:
                copied_ns += move.duration_ns
                shared_ns += lane.toll_share * move.duration_ns
        if copied_ns:
            idle_ns = makespan_ns - sum(run.duration_ns for run in plan.runs)
            shared_ns *= max(0.0, 1 - max(0, idle_ns) / copied_ns)
        return each_ns + shared_ns
