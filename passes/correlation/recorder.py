"""Records runs as a trace: a runtime calls it with the same reports as the predictor."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol

from offcompile.ir import OffloadError
from offcompile.ir.trace import Block, Run, Trace

from .blocks import BlockId

#: longer recordings are cut off: they repeat themselves
MOST_RUNS = 100_000


class Listener(Protocol):
    """The reports of a runtime; the predictor and the recorder both implement it."""

    def enter(self, execution: Hashable) -> None: ...

    def touch(self, block: BlockId, nbytes: int, reads: bool = True) -> object: ...

    def wrote(self, block: BlockId) -> None: ...

    def leave(self) -> None: ...

    def dead(self, block: BlockId) -> object: ...


@dataclass
class _Open:
    """The run being recorded."""

    graph: str
    binding: str | None
    began_us: float
    duration_us: float = 0.0
    reads: dict[str, None] = field(default_factory=dict)
    writes: dict[str, None] = field(default_factory=dict)
    dead: dict[str, None] = field(default_factory=dict)

    def run(self) -> Run:
        lists = (tuple(names) for names in (self.reads, self.writes, self.dead))
        return Run(self.graph, self.duration_us, self.binding, *lists)


class Recorder:
    """Collects a `Trace`. `clock_us` should stop while a run waits for its blocks."""

    def __init__(
        self,
        clock_us: Callable[[], float] = lambda: time.perf_counter_ns() / 1000,
        most_runs: int = MOST_RUNS,
    ) -> None:
        self._clock_us = clock_us
        self._most_runs = most_runs
        self._names: dict[BlockId, str] = {}
        self._taken: set[str] = set()
        self._nbytes: dict[str, int] = {}
        self._runs: list[_Open] = []
        self._inside = False
        self._gone: set[str] = set()

    @property
    def full(self) -> bool:
        """True if the recording has reached its maximum number of runs; later runs are left out."""
        return len(self._runs) >= self._most_runs and not self._inside

    def enter(self, execution: Hashable) -> None:
        """Starts a run. A pair is read as (graph, binding)."""
        if self._inside:
            self.leave()
        if self.full:
            return
        graph, binding = _parts(execution)
        bound = None if binding is None else str(binding)
        self._runs.append(_Open(str(graph), bound, self._clock_us()))
        self._inside = True

    def touch(self, block: BlockId, nbytes: int, reads: bool = True) -> None:
        """Records that the run uses a block. A block that grows keeps its largest size."""
        if not self._inside:
            return
        name = self._name(block)
        self._nbytes[name] = max(nbytes, self._nbytes.get(name, 0))
        run = self._runs[-1]
        if reads and name not in run.writes:
            if name in self._gone:
                raise OffloadError(
                    f"{run.graph} reads the block {name}, which was reported dead and has not been"
                    " written since. Report deaths after the last reader, or touch it with"
                    " reads=False where it is written anew."
                )
            run.reads[name] = None
        if not reads:
            self.wrote(block)

    def wrote(self, block: BlockId) -> None:
        """Records that the run has written the block."""
        if self._inside:
            name = self._name(block)
            self._runs[-1].writes[name] = None
            self._gone.discard(name)

    def leave(self) -> None:
        if self._inside:
            run = self._runs[-1]
            run.duration_us = round(self._clock_us() - run.began_us, 3)
            self._inside = False

    def dead(self, block: BlockId) -> None:
        """Records that the block died, in the current run or else in the last one."""
        name = self._names.get(block)
        if name is not None and name in self._nbytes and self._runs:
            self._runs[-1].dead[name] = None
            self._gone.add(name)

    def trace(self) -> Trace:
        """Returns the trace recorded so far."""
        blocks = tuple(Block(name, nbytes) for name, nbytes in self._nbytes.items())
        done = self._runs[:-1] if self._inside else self._runs
        return Trace(blocks, tuple(run.run() for run in done))

    def _name(self, block: BlockId) -> str:
        name = self._names.get(block)
        if name is None:
            name = block if isinstance(block, str) and block else f"block{len(self._names)}"
            while name in self._taken:
                name += "'"
            self._names[block] = name
            self._taken.add(name)
        return name


def _parts(execution: Hashable) -> tuple[Hashable, Hashable]:
    if isinstance(execution, tuple) and len(execution) == 2:
        return execution
    return execution, None
