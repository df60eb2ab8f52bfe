"""A plan (which tensors move, when, and other changes to plain execution) and its timeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import Violation
from .model import DEVICE


@dataclass(frozen=True)
class Start:
    """A copy that is on `tier` in the settled state, in which each step begins and ends."""

    tensor: str
    tier: str


@dataclass(frozen=True)
class Move:
    """Copy `tensor` from one tier to another over `lane`.

    Moves queue on their lane in the listed order. A move starts after `start_after` (an op or
    move of the same step; None: at the start of the step); the op `ready_before` waits for it
    (None: the step's end). A move that `wraps` may start in the next step and is awaited there.
    """

    id: str
    tensor: str
    source: str
    target: str
    lane: str
    start_after: str | None = None
    ready_before: str | None = None
    wraps: bool = False
    codec: str | None = None


@dataclass(frozen=True)
class Drop:
    """Free the copy on `tier` once `after` has ended and the copy can be spared."""

    tensor: str
    tier: str
    after: str | None = None


@dataclass(frozen=True)
class Direct:
    """`op` accesses `tensor` in place on the host."""

    op: str
    tensor: str


@dataclass(frozen=True)
class Recompute:
    """`op` runs again immediately before the op `before`."""

    op: str
    before: str

    @property
    def id(self) -> str:
        return f"{self.op}@{self.before}"


@dataclass(frozen=True)
class Update:
    """Where the update op of `weight` runs: `host` or `device`."""

    weight: str
    where: str


@dataclass(frozen=True)
class Plan:
    start: tuple[Start, ...] = ()
    moves: tuple[Move, ...] = ()
    drops: tuple[Drop, ...] = ()
    directs: tuple[Direct, ...] = ()
    recomputes: tuple[Recompute, ...] = ()
    updates: tuple[Update, ...] = ()

    @property
    def moves_nothing(self) -> bool:
        """True if everything stays on the device and nothing is recomputed."""
        on_host = any(update.where != DEVICE for update in self.updates)
        return not (self.moves or self.directs or self.recomputes or on_host)


COMPUTE = "compute"
HOST_COMPUTE = "host_compute"


@dataclass(frozen=True)
class Span:
    """One thing that ran in one step: an op, a host update (lane `host_compute`) or a move.

    Times are absolute from the start of the first step. A wrapped move belongs to the step
    that queued it, even if it runs in the next.
    """

    id: str
    lane: str
    step: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True)
class Freed:
    """A copy released its bytes at `time_ns`: by a drop, by its death, or as stale."""

    tensor: str
    tier: str
    time_ns: int
    cause: str  # "drop" | "death" | "stale"
    #: number of spans started by then; orders events of the same instant
    started: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Stall:
    """Time in the settled step during which the compute lane waited before `op`."""

    op: str
    start_ns: int
    duration_ns: int
    waited_for: tuple[str, ...]


@dataclass(frozen=True)
class Timeline:
    """The simulated run of a plan until it settles.

    `steps` holds (start, end) of each simulated step; `makespan_us` is the settled one's length.
    A plan that cannot go on has `violations` and no meaningful makespan.
    """

    makespan_us: float
    peak_bytes: Mapping[str, int] = field(hash=False)
    spans: tuple[Span, ...] = ()
    freed: tuple[Freed, ...] = ()
    stalls: tuple[Stall, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()
    settled: bool = True
    note: str | None = None
    violations: tuple[Violation, ...] = ()
    #: compute time that the moves of a step cost (`Lane.toll_us`, `toll_share`)
    toll_us: float = 0.0

    @property
    def cost_us(self) -> float:
        """The cost that planners compare: the step's time plus the tolls of its moves."""
        return self.makespan_us + self.toll_us

    @property
    def valid(self) -> bool:
        return not self.violations
