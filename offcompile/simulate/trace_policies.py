"""The policies that a trace is simulated with: our own, and others as references."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from offcompile.ir import Machine
from offcompile.ir.trace import Run, Trace
from offcompile.passes.correlation.blocks import BlockId, Item
from offcompile.passes.correlation.learned import Learned
from offcompile.passes.correlation.predictor import Predictor, Reach

from .trace_run import TraceResult, run_trace


class NoForecast:
    """A forecast that knows nothing."""

    def begin(self, execution: Hashable, expected: bool) -> bool:
        return expected

    def touch(self, block: BlockId, nbytes: int, born: bool) -> None:
        return

    def end(self) -> None:
        return

    def dead(self, block: BlockId) -> None:
        return

    def items(self, execution: Hashable) -> Sequence[Item]:
        return ()

    def ahead(self) -> tuple[Hashable, Sequence[Item]] | None:
        return None


class Oracle(NoForecast):
    """A forecast that reads the trace itself and knows everything in advance."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._now = self._end = -1

    def begin(self, execution: Hashable, expected: bool) -> bool:
        self._now += 1
        if not expected:
            self._end = self._now
        return expected

    def items(self, execution: Hashable) -> Sequence[Item]:
        return self._items(self._trace.runs[self._now])

    def ahead(self) -> tuple[Hashable, Sequence[Item]] | None:
        if self._end + 1 >= len(self._trace.runs):
            return None
        self._end += 1
        run = self._trace.runs[self._end]
        return run.execution, self._items(run)

    def _items(self, run: Run) -> Sequence[Item]:
        nbytes = self._trace.nbytes
        return [Item(b, nbytes[b], b not in run.reads) for b in run.touched]


def without_bindings(trace: Trace) -> Trace:
    """The trace without bindings, so that the graph alone identifies an execution."""
    return replace(trace, runs=tuple(replace(run, binding=None) for run in trace.runs))


@dataclass(frozen=True)
class TracePolicy:
    name: str
    make: Callable[[Trace], Predictor]
    prefetch: bool = True
    #: True if the graph alone identifies an execution
    shared_ids: bool = False

    def run(self, trace: Trace, machine: Machine) -> TraceResult:
        trace = without_bindings(trace) if self.shared_ids else trace
        return run_trace(trace, machine, self.make(trace), self.prefetch)


def _lru(trace: Trace) -> Predictor:
    return Predictor(NoForecast(), Reach(0))


def _all_known(trace: Trace) -> Predictor:
    return Predictor(Oracle(trace), Reach(len(trace.runs)))


def _learnt(trace: Trace) -> Predictor:
    return Predictor()


def _printed(trace: Trace) -> Predictor:
    """The paper's N, without a limit in bytes; evicts the blocks that were loaded first."""
    return Predictor(Learned(), Reach(32, as_printed=True))


TRACE_POLICIES = (
    TracePolicy("lru", _lru, prefetch=False),
    TracePolicy("belady", _all_known, prefetch=False),
    TracePolicy("oracle", _all_known),
    TracePolicy("correlation", _learnt),
    TracePolicy("printed", _printed),
    TracePolicy("printed_shared_ids", _printed, shared_ids=True),
)
