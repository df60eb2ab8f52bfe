"""The state of one simulation: the copies, the lanes, and the progress of the step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from offcompile.ir import COMPUTE, HOST_COMPUTE, Stall

from .compiled import CompiledPlan, CompiledRun, Transfer
from .copies import Copies
from .links import FULL


@dataclass(slots=True)
class StepWindow:
    """The starts in one step, relative to its start: equal windows mean a settled schedule."""

    start_ns: int
    starts: list[tuple[int, int, int]] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)


@dataclass(slots=True)
class ComputeLane:
    """The progress of a step's ops, or of its host updates, which run one after the other."""

    number: int  # 0: ops, 1: host updates
    name: str
    #: number of the tier that holds their workspace
    tier: int
    runs: list[CompiledRun]
    started: int = 0
    done: int = 0
    end_ns: int = -1  # -1: idle


@dataclass(slots=True)
class CopyLane:
    """The progress of a lane: its moves in order, of this step or of the previous one."""

    queue: list[int]
    place: int = 0
    step: int = 0
    move: int = -1  # -1: idle
    end_ns: int = -1  # -1: idle
    span: int = -1  # the number of the move's span in the journal
    #: over a shared link: the speed in millionths of the full one, since when, and the work that
    #: was left then, in nanoseconds at a speed of one millionth
    pace: int = FULL
    since_ns: int = 0
    left: int = 0

    def left_at(self, now: int) -> int:
        return self.left - self.pace * (now - self.since_ns)


class UnderWay(NamedTuple):
    """A move that is under way when a step ends; -1 in all fields if there is none."""

    span: int
    move: int
    left: int


@dataclass(frozen=True, slots=True)
class Beginning:
    """The state at the beginning of a step: everything that its course depends on, relative to
    its start, and the lengths of the records before it."""

    now: int
    spans: int
    freed: int
    #: per lane, the move that is under way
    under_way: tuple[UnderWay, ...]
    state: tuple[object, ...]


class SimulationState(Copies):
    """The whole state; `diagnosis` reads it in a deadlock, and `settle` at the end of a step."""

    def __init__(self, plan: CompiledPlan, record: bool) -> None:
        super().__init__(plan, record)
        self.step = 0
        self.ops = ComputeLane(0, COMPUTE, self.base.device, plan.runs)
        self.updates = ComputeLane(1, HOST_COMPUTE, self.base.host, plan.updates)
        self.move_count = [0] * len(plan.moves)  # how many times each move has ended
        self.lanes = [CopyLane(queue) for queue in plan.lanes]
        self.plain_done = 0
        self.last_run_end = 0
        self.waiting: dict[str, None] = {}
        self.window = StepWindow(0)
        self.began = Beginning(0, 0, 0, (), ())
        self.previous: StepWindow | None = None
        self.settled = True

    def lane_head(self, lane: CopyLane) -> int | None:
        """The next move of `lane`, if this step or the previous one queued one."""
        if lane.place == len(lane.queue):
            if lane.step == self.step or not lane.queue:
                return None
            lane.step += 1
            lane.place = 0
        return lane.queue[lane.place]

    def triggered(self, move: Transfer, step: int) -> bool:
        kind, index = move.trigger
        if kind == "move":
            return self.move_count[index] > step
        if kind == "start" or self.step > step:
            return True
        return (self.ops if kind == "run" else self.updates).done > index

    def room_after(self, run: CompiledRun) -> dict[int, int]:
        """Per tier, the bytes left (below 0: missing) after taking outputs and workspace."""
        base, n = self.base, self.base.n_tiers
        need = {base.host if run.on_host else base.device: run.workspace}
        for key in run.writes:
            extra = base.nbytes[key // n] - self.size[key]
            if extra:
                need[key % n] = need.get(key % n, 0) + extra
        return {tier: base.capacity[tier] - self.used[tier] - b for tier, b in need.items() if b}
