"""The state of one simulation: the copies, the lanes, and the progress of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from offcompile.ir import Stall

from .compiled import CompiledPlan, CompiledRun, Transfer
from .copies import Copies


@dataclass(slots=True)
class StepWindow:
    """The starts in one step, relative to its start: equal windows mean a settled schedule."""

    start_ns: int
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state at the beginning of a step: everything that its course depends on, relative to
    its start, and the lengths of the records before it."""

    now: int
    spans: int
    freed: int
    state: tuple[object, ...]


class SimulationState(Copies):
    """The whole state; `diagnosis` reads it in a deadlock, and `settle` at the end of a step."""

    def __init__(self, plan: CompiledPlan, record: bool) -> None:
        super().__init__(plan, record)
        self.step = 0
        self.run_index = self.update_index = 0  # numbers started in this step
        self.run_end = self.update_end = -1  # -1: idle
        self.runs_done = self.updates_done = 0
        self.move_count = [0] * len(plan.moves)  # how many times each move has ended
        n_lanes = len(plan.lanes)
        self.lane_place, self.lane_step = [0] * n_lanes, [0] * n_lanes
        self.lane_move, self.lane_end = [-1] * n_lanes, [-1] * n_lanes
        self.plain_done = 0
        self.last_run_end = 0
        self.waiting: dict[str, None] = {}
        self.window = StepWindow(0)
        self.began = Beginning(0, 0, 0, ())
        self.previous: StepWindow | None = None
        self.steps: list[tuple[int, int]] = []
        self.settled = True

    def lane_head(self, lane: int) -> int | None:
        """The next move of `lane`, if this step or the previous one queued one."""
        queue = self.p.lanes[lane]
        if self.lane_place[lane] == len(queue):
            if self.lane_step[lane] == self.step or not queue:
                return None
            self.lane_step[lane] += 1
            self.lane_place[lane] = 0
        return queue[self.lane_place[lane]]

    def triggered(self, move: Transfer, step: int) -> bool:
        kind, index = move.trigger
        if kind == "move":
            return self.move_count[index] > step
        if kind == "start" or self.step > step:
            return True
        return (self.runs_done if kind == "run" else self.updates_done) > index

    def room_after(self, run: CompiledRun) -> dict[int, int]:
        """Per tier, the bytes left (below 0: missing) after taking outputs and workspace."""
        base, n = self.base, self.base.n_tiers
        need = {base.host if run.on_host else base.device: run.workspace}
        for key in run.writes:
            extra = base.nbytes[key // n] - self.size[key]
            if extra:
                need[key % n] = need.get(key % n, 0) + extra
        return {tier: base.capacity[tier] - self.used[tier] - b for tier, b in need.items() if b}
