"""The state of one simulation: the copies, each lane, and how far the step has come."""

from __future__ import annotations

from dataclasses import dataclass, field

from offcompile.ir import Stall

from .compiled import CompiledPlan, Run, Transfer
from .copies import Copies


@dataclass(slots=True)
class Window:
    """What started in one step, relative to its start: equal windows mean a settled schedule."""

    start_ns: int
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Beginning:
    """Where a step begins: all that its course depends on, relative to its start, and how much
    has been written down before it."""

    now: int
    spans: int
    freed: int
    state: tuple[object, ...]


class State(Copies):
    """Read by `diagnosis` when the simulation is stuck, and by `settle` when a step ends."""

    def __init__(self, plan: CompiledPlan, record: bool) -> None:
        super().__init__(plan, record)
        self.step = 0
        self.run_index = self.update_index = 0  # how many have started in this step
        self.run_end = self.update_end = -1  # -1: idle
        self.runs_done = self.updates_done = 0
        self.move_count = [0] * len(plan.moves)  # how many times each move has ended
        n_lanes = len(plan.lanes)
        self.lane_place, self.lane_step = [0] * n_lanes, [0] * n_lanes
        self.lane_move, self.lane_end = [-1] * n_lanes, [-1] * n_lanes
        self.plain_done = 0
        self.last_run_end = 0
        self.waiting: dict[str, None] = {}
        self.window = Window(0)
        self.began = Beginning(0, 0, 0, ())
        self.previous: Window | None = None
        self.steps: list[tuple[int, int]] = []
        self.settled = True

    def lane_head(self, lane: int) -> int | None:
        """The move that `lane` turns to next, if this step or the one before queued one."""
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

    def room_after(self, run: Run) -> dict[int, int]:
        """Per tier, the bytes left (below 0: missing) once outputs and workspace are held."""
        base, n = self.base, self.base.n_tiers
        need = {base.host if run.on_host else base.device: run.workspace}
        for key in run.writes:
            extra = base.nbytes[key // n] - self.size[key]
            if extra:
                need[key % n] = need.get(key % n, 0) + extra
        return {tier: base.capacity[tier] - self.used[tier] - b for tier, b in need.items() if b}
