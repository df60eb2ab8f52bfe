"""Records what compiled graphs run and touch, as a trace (`offcompile.ir.trace`).

    with offcompile.record("trace.json"):
        train()

An execution is one half of a compiled graph with the parameters that it was called with. Blocks are
parameters, activations saved for backward, and gradients, as listed in the graph's problem, moved
or not. So the recording does not depend on the budget of the run.
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from offcompile.graph.annotate import Annotated
from offcompile.graph.graphs import Graphs
from offcompile.ir import BACKWARD, FORWARD, InvalidInput, Op, Problem, Violation
from offcompile.ir.trace import Trace
from offcompile.ir.traceio import print_trace, trace_to_json
from offcompile.passes.correlation.recorder import MOST_RUNS, Recorder
from offcompile.runtime.base.counters import now_ns
from offcompile.runtime.moves.registry import runtimes

from .accounts.usage import ParameterSet, PendingBackward


@dataclass(frozen=True)
class Touched:
    """The tensors that a compiled graph reads and writes and that outlive one of its halves."""

    #: weight → its index among the parameters that the graph is called with; None: not one of them
    weights: Mapping[str, int | None]
    #: half → weights that it reads, in order
    read: Mapping[str, tuple[str, ...]]
    #: made in forward and used in backward
    saved: tuple[str, ...]
    gradients: tuple[str, ...]
    nbytes: Mapping[str, int]


def touched_by(problem: Problem, weights: Mapping[str, int]) -> Touched:
    """List what a graph touches. `weights`: tensor → its index among the graph's parameters."""
    forward = [op for op in problem.ops if op.phase != BACKWARD]
    backward = [op for op in problem.ops if op.phase == BACKWARD]
    made = {t for op in forward for t in op.writes}
    kinds = {t.id: t.kind for t in problem.tensors}

    def read(ops: Sequence[Op]) -> tuple[str, ...]:
        reads = dict.fromkeys(t for op in ops for t in op.reads)
        return tuple(t for t in reads if kinds[t] == "weight")

    halves = {FORWARD: read(forward), BACKWARD: read(backward)}
    return Touched(
        {t: weights.get(t) for t in dict.fromkeys(halves[FORWARD] + halves[BACKWARD])},
        halves,
        tuple(dict.fromkeys(t for op in backward for t in op.reads if t in made)),
        tuple(dict.fromkeys(t for op in backward for t in op.writes if kinds[t] == "gradient")),
        {t.id: t.nbytes for t in problem.tensors},
    )


def weights_of(graphs: Graphs, annotated: Annotated, parameters: Sequence[int]) -> dict[str, int]:
    """Map tensors of the problem to their index among the parameters of the graphs."""
    found = {}
    for node in graphs.forward.graph.find_nodes(op="placeholder"):
        storage = annotated.storage_of.get((FORWARD, node.name))
        argument = getattr(node.meta.get("desc"), "idx", None)
        if storage is not None and argument in parameters:
            found[storage] = parameters.index(argument)
    return found


@dataclass(eq=False)
class _Forward:
    """A forward whose backward has not run. `number` is unique among those of its execution."""

    execution: Hashable
    number: int
    blocks: list[tuple[str, int]]
    waits: weakref.ref[PendingBackward] | None = None


class Clock:
    """Counts microseconds, without the time that compute has waited for moves."""

    def __init__(self) -> None:
        self._waited_us = 0.0

    def __call__(self) -> float:
        waited_us = sum(r.mover.tally.wait_us for r in runtimes())
        # the user may reset the counters
        self._waited_us = max(self._waited_us, waited_us)
        return now_ns() / 1000 - self._waited_us


class Recording:
    """Records the runs of compiled graphs and the blocks that they touch."""

    def __init__(self, most_runs: int = MOST_RUNS) -> None:
        self._recorder = Recorder(Clock(), most_runs)
        self._bindings: weakref.WeakKeyDictionary[ParameterSet, int] = weakref.WeakKeyDictionary()
        self._numbers = itertools.count()
        self._weights: dict[int, str] = {}
        self._forwards: list[_Forward] = []
        self._newest: _Forward | None = None

    def trace(self) -> Trace:
        return self._recorder.trace()

    @contextmanager
    def running(
        self, graph: str, phase: str, binding: ParameterSet, touched: Touched, device: torch.device
    ) -> Iterator[None]:
        """Wrap a run of one half of a graph; returns once its device has finished."""
        self._bury()
        if self._recorder.full:
            yield
            return
        if binding not in self._bindings:
            self._bindings[binding] = next(self._numbers)
        where = f"{graph.replace(' ', '')}.{self._bindings[binding]}"
        _finish(device)
        self._recorder.enter((f"{graph.replace(' ', '')}.{phase}", str(self._bindings[binding])))
        for t in touched.read[BACKWARD if phase == BACKWARD else FORWARD]:
            self._recorder.touch(self._weight(t, where, binding, touched), touched.nbytes[t])
        if phase == BACKWARD:
            self._return(where)
            for t in touched.gradients:
                self._recorder.touch(f"{where}.{t}", touched.nbytes[t], reads=False)
        elif phase == FORWARD:
            self._leave(where, touched)
        try:
            yield
        finally:
            _finish(device)
            self._recorder.leave()

    def waits(self, one: PendingBackward | None) -> None:
        """Note that the forward that has just run waits for its backward; None: it gets none."""
        newest, self._newest = self._newest, None
        if newest is not None and one is not None:
            newest.waits = weakref.ref(one)
            self._forwards.append(newest)
        elif newest is not None:
            self._die(newest)

    def _weight(self, tensor: str, where: str, binding: ParameterSet, touched: Touched) -> str:
        position = touched.weights[tensor]
        if position is None or position >= len(binding.in_order):
            return f"{where}.{tensor}"
        return self._weights.setdefault(binding.in_order[position], f"weight{len(self._weights)}")

    def _leave(self, where: str, touched: Touched) -> None:
        taken = {f.number for f in self._forwards if f.execution == where}
        number = next(i for i in range(len(taken) + 1) if i not in taken)
        blocks = [(f"{where}.{t}.{number}", touched.nbytes[t]) for t in touched.saved]
        for block, nbytes in blocks:
            self._recorder.touch(block, nbytes, reads=False)
        self._newest = _Forward(where, number, blocks)

    def _return(self, where: str) -> None:
        for forward in reversed(self._forwards):
            if forward.execution == where:
                for block, nbytes in forward.blocks:
                    self._recorder.touch(block, nbytes)
                self._forwards.remove(forward)
                self._die(forward)
                return

    def _bury(self) -> None:
        """Forget forwards whose outputs were dropped: they get no backward."""
        for forward in list(self._forwards):
            if forward.waits is not None and forward.waits() is None:
                self._forwards.remove(forward)
                self._die(forward)

    def _die(self, forward: _Forward) -> None:
        for block, _ in forward.blocks:
            self._recorder.dead(block)


def _finish(device: torch.device) -> None:
    """Wait for the device to finish its queued work, so that times cover the work itself."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


# per process: a recording covers every graph that runs meanwhile, wherever it was compiled
_recordings: list[Recording] = []


def recorded() -> Recording | None:
    """The recording in progress; None if there is none."""
    return _recordings[-1] if _recordings else None


@contextmanager
def record(path: str | Path, most_runs: int = MOST_RUNS) -> Iterator[Recording]:
    """Record what compiled graphs run meanwhile, and write it to `path` (.json, or .txt for lines).

    The file is written even if the block raises. Recording stops after `most_runs` runs. Only one
    recording at a time.
    """
    if _recordings:
        raise _refused("a recording goes on already; end it before another begins")
    target = Path(path)
    if target.suffix not in (".json", ".txt"):
        raise _refused(f"{target}: the name must end in .json or .txt")
    if not target.parent.is_dir():
        raise _refused(f"{target}: there is no directory {target.parent}; make it before")
    recording = Recording(most_runs)
    _recordings.append(recording)
    try:
        yield recording
    finally:
        _recordings.clear()
        trace = recording.trace()
        is_json = target.suffix == ".json"
        text = json.dumps(trace_to_json(trace), indent=1) if is_json else print_trace(trace)
        target.write_text(text, encoding="utf-8")


def _refused(detail: str) -> InvalidInput:
    return InvalidInput([Violation("bad-value", "record", detail)])
