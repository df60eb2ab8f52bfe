"""The speed of moves over shared links, which may change whenever a task starts or ends."""

from __future__ import annotations

from collections.abc import Sequence

from .compiled import CompiledPlan, CompiledProblem
from .links import FULL
from .state import ComputeLane, CopyLane

#: the end of a move that stands still
NEVER = 1 << 200


class Paces:
    """Sets the speeds of the moves that run, so that they share what ops leave of each link."""

    def __init__(self, base: CompiledProblem, lanes: Sequence[CopyLane]) -> None:
        self._links = [link.lane_shares for link in base.links]
        self._lanes = [(i, lane) for i, lane in enumerate(lanes) if any(x[i] for x in self._links)]
        self._known: dict[tuple[object, ...], dict[int, int]] = {}

    def set(self, now: int, ops: ComputeLane, updates: ComputeLane) -> None:
        """Adjusts the ends of all moves that run to the tasks that run beside them."""
        running = tuple([i for i, lane in self._lanes if lane.end_ns >= 0])
        if not running:
            return
        by_ops = ops.runs[ops.started - 1].link_shares if ops.end_ns >= 0 else ()
        by_updates = updates.runs[updates.started - 1].link_shares if updates.end_ns >= 0 else ()
        state = running, by_ops, by_updates
        paces = self._known.get(state)
        if paces is None:
            paces = self._known[state] = self._paces(running, by_ops, by_updates)
        for i, lane in self._lanes:
            if lane.end_ns >= 0 and lane.pace != paces[i]:
                lane.left, lane.since_ns, lane.pace = lane.left_at(now), now, paces[i]
                lane.end_ns = now - (-lane.left // lane.pace) if lane.pace else NEVER

    def _paces(
        self, running: tuple[int, ...], by_ops: tuple[int, ...], by_updates: tuple[int, ...]
    ) -> dict[int, int]:
        paces = dict.fromkeys(running, FULL)
        for k, shares in enumerate(self._links):
            taken = sum(taken[k] for taken in (by_ops, by_updates) if taken)
            wanted = sum(shares[i] for i in running)
            for i in running:
                if shares[i]:
                    paces[i] = min(paces[i], FULL * max(0, FULL - taken) // wanted)
        return paces


def may_slow_down(plan: CompiledPlan) -> bool:
    """True if a link may ever be asked for more than its rate: most plans never do that."""
    if not plan.base.links:
        return False
    crowded = any(sum(link.lane_shares) > FULL for link in plan.base.links)
    return crowded or any(any(run.link_shares) for run in (*plan.runs, *plan.updates))


def busy_ns(plan: CompiledPlan) -> int:
    """The time for which the busiest link is taken in a step."""
    found = [0]
    for k, link in enumerate(plan.base.links):
        taken = sum(r.link_shares[k] * r.duration_ns for r in plan.runs if r.link_shares)
        taken += sum(link.lane_shares[m.lane] * m.duration_ns for m in plan.moves)
        found.append(taken // FULL)
    return max(found)
