"""Simulates a trace block by block, while a predictor decides on prefetches and evictions.

Each run waits until all its blocks are on the device, then computes. There is one lane in and one
lane out, one copy at a time on each. A missing block takes precedence over prefetches that have
not begun; a copy that has begun is not aborted. Evicting a clean block frees its memory at once, a
modified one when its copy out has ended. Time is in whole nanoseconds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from offcompile.ir import DEVICE, HOST, InvalidInput, Lane, Machine, Violation
from offcompile.ir.trace import Run, Trace
from offcompile.ir.units import move_ns, round_ns
from offcompile.passes.correlation.predictor import BORN, HIT, Counters, Predictor


@dataclass(frozen=True)
class TraceResult:
    """The cost of a trace. `stall_us` is the runs' waiting time; `bytes_in` counts every load."""

    makespan_us: float
    stall_us: float
    counters: Counters
    bytes_in: int
    bytes_out: int
    peak_bytes: int
    table_bytes: int

    @property
    def miss_rate(self) -> float:
        return self.counters.miss_rate


def run_trace(
    trace: Trace, machine: Machine, predictor: Predictor, prefetch: bool = True
) -> TraceResult:
    """Simulates a trace. Without `prefetch`, the predictor only chooses victims on demand.

    Raises `InvalidInput` if the device cannot hold the blocks of one run.
    """
    return TraceRun(trace, machine, predictor, prefetch).result()


@dataclass(slots=True)
class TraceLane:
    """The lane in or out; copies one block at a time."""

    lane: Lane
    #: (block, end) of the copy in flight
    copy: tuple[str, int] | None = None
    moved_bytes: int = 0

    @classmethod
    def of(cls, machine: Machine, source: str, target: str) -> TraceLane:
        lanes = machine.lanes_between(source, target)
        if len(lanes) != 1:
            detail = (
                f"a trace needs one lane from {source} to {target}, and this machine has"
                f" {len(lanes)}; list just one"
            )
            raise InvalidInput([Violation("bad-value", "machine.lanes", detail)])
        return cls(lanes[0])

    def begin(self, block: str, nbytes: int, now_ns: int) -> None:
        took_ns = move_ns(nbytes, self.lane.bytes_per_us, self.lane.latency_us)
        self.copy = (block, now_ns + took_ns)
        self.moved_bytes += nbytes

    def ended(self, now_ns: int) -> str | None:
        """The block whose copy ends now, if any; the lane is then free."""
        if self.copy is None or self.copy[1] != now_ns:
            return None
        block, _ = self.copy
        self.copy = None
        return block


class TraceRun:
    def __init__(
        self, trace: Trace, machine: Machine, predictor: Predictor, prefetch: bool
    ) -> None:
        self.trace, self.predictor, self.prefetch = trace, predictor, prefetch
        self.inward = TraceLane.of(machine, HOST, DEVICE)
        self.outward = TraceLane.of(machine, DEVICE, HOST)
        capacity = machine.tier[DEVICE].capacity_bytes
        needed = trace.largest_run_bytes
        self.capacity = max(trace.total_bytes, 1) if capacity is None else capacity
        if needed > self.capacity:
            detail = (
                f"one run touches {needed:,} bytes and the device holds {self.capacity:,};"
                f" raise its capacity to {needed:,} bytes, or record the trace in smaller runs"
            )
            raise InvalidInput([Violation("no-space", "machine.tiers", detail)])
        self.free = self.capacity
        self.low = self.capacity
        self.now = 0
        self.stall_ns = 0
        self.to_go: deque[str] = deque()
        self.going_bytes = 0
        self.demanding = False

    def result(self) -> TraceResult:
        for run in self.trace.runs:
            self._run(run)
        return TraceResult(
            makespan_us=self.now / 1000,
            stall_us=self.stall_ns / 1000,
            counters=self.predictor.counters,
            bytes_in=self.inward.moved_bytes,
            bytes_out=self.outward.moved_bytes,
            peak_bytes=self.capacity - self.low,
            table_bytes=self.predictor.table_bytes,
        )

    # ---- one run ---------------------------------------------------------------------------

    def _run(self, run: Run) -> None:
        predictor, began, read = self.predictor, self.now, set(run.reads)
        predictor.enter(run.execution)
        self._pump()
        for block in run.touched:
            outcome = predictor.touch(block, self.trace.nbytes[block], reads=block in read)
            if outcome != HIT:
                self._bring(block, born=outcome == BORN)
        for block in run.writes:
            self._settle(block)
        self.stall_ns += self.now - began
        self._pump()
        self._until(self.now + round_ns(run.duration_us))
        for block in run.writes:
            predictor.wrote(block)
        predictor.leave()
        ended = self.now
        for block in run.dead:
            self._settle(block)
            self.free += predictor.dead(block)
        self.stall_ns += self.now - ended
        self._pump()

    def _bring(self, block: str, born: bool) -> None:
        """Waits until the block is on the device or, if born, has its memory."""
        nbytes, held = self.trace.nbytes[block], self.predictor.window.held
        self.demanding = True
        while block not in held or held[block].arriving:
            if block in held:
                self._until_event()
            elif born and self._make_room(nbytes):
                self._take(nbytes)
                self.predictor.fetching(block, nbytes)
                self.predictor.arrived(block)
            elif born or self.inward.copy is not None:
                self._until_event()
            elif self._make_room(nbytes):
                self._load(block, nbytes, prefetch=False)
            else:
                self._until_event()
        self.demanding = False

    def _settle(self, block: str) -> None:
        """Waits while the block is copied out, since it must not be written or die meanwhile."""
        while self.outward.copy is not None and self.outward.copy[0] == block:
            self._until_event()

    def _make_room(self, nbytes: int) -> bool:
        """True if there is room now; if not, evicts blocks until there will be."""
        missing = nbytes - self.free - self.going_bytes
        if missing > 0:
            self._let_go(missing, None)
        return self.free >= nbytes

    # ---- the lanes -------------------------------------------------------------------------

    def _pump(self) -> None:
        """Begins every copy that can begin now."""
        while self.prefetch and not self.demanding:
            found = self.predictor.predictions(self.free, limit=1)
            if found:
                if self.inward.copy is not None:
                    break
                self._load(found[0].block, found[0].nbytes, prefetch=True)
                continue
            lack = self.predictor.shortfall(self.free + self.going_bytes)
            if lack is None or not self._let_go(lack[1], lack[0]):
                break
        self._go()

    def _let_go(self, missing: int, wanted: object) -> bool:
        victims = self.predictor.victims(missing, wanted)  # type: ignore[arg-type]
        for victim in victims:
            block = str(victim.block)
            if victim.write_back:
                self.predictor.leaving(block)
                self.to_go.append(block)
                self.going_bytes += victim.nbytes
            else:
                self.predictor.left(block)
                self.free += victim.nbytes
        self._go()
        return bool(victims)

    def _go(self) -> None:
        """Begins the next copy out; skips blocks that have been used again meanwhile."""
        while self.outward.copy is None and self.to_go:
            block = self.to_go.popleft()
            nbytes = self.trace.nbytes[block]
            if self.predictor.is_leaving(block):
                self.outward.begin(block, nbytes, self.now)
            else:
                self.going_bytes -= nbytes

    def _load(self, block: object, nbytes: int, prefetch: bool) -> None:
        self._take(nbytes)
        self.inward.begin(str(block), nbytes, self.now)
        self.predictor.fetching(str(block), nbytes, prefetch)

    def _take(self, nbytes: int) -> None:
        self.free -= nbytes
        self.low = min(self.low, self.free)

    # ---- time ------------------------------------------------------------------------------

    def _next_end(self) -> int | None:
        ends = [lane.copy[1] for lane in (self.inward, self.outward) if lane.copy is not None]
        return min(ends, default=None)

    def _until_event(self) -> None:
        """Advances to the next end of a copy."""
        end = self._next_end()
        if end is None:
            detail = "a run waits for room, and nothing can leave; raise the device's capacity"
            raise InvalidInput([Violation("deadlock", "trace", detail)])
        self._until(end)

    def _until(self, time_ns: int) -> None:
        while (end := self._next_end()) is not None and end <= time_ns:
            self.now = end
            self._complete()
            self._pump()
        self.now = time_ns

    def _complete(self) -> None:
        arrived = self.inward.ended(self.now)
        if arrived is not None:
            self.predictor.arrived(arrived)
        block = self.outward.ended(self.now)
        if block is not None:
            nbytes = self.trace.nbytes[block]
            self.going_bytes -= nbytes
            still = self.predictor.is_leaving(block)
            self.predictor.cleaned(block)
            if still:
                self.predictor.left(block)
                self.free += nbytes
