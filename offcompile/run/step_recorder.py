"""Records the last few steps of one compiled graph as they run; reports show the median.

A step is a forward and its backward. If the pairing is not certain (several forwards before a
backward, one graph on several threads), nothing is recorded.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from offcompile.ir import BACKWARD, COMPUTE, FORWARD
from offcompile.planning.feedback.measured import MeasuredSpan, MeasuredStep, MeasuredWait
from offcompile.planning.order import ProgramStep, RunStep, StartStep
from offcompile.runtime.base.clock import StepClock, WallClock
from offcompile.runtime.device.move_events import MoveListener, listening, profiled, profiling
from offcompile.runtime.device.reductions import REDUCTION, SentBucket, since

#: number of steps whose median is shown
STEPS_KEPT = 5
#: steps recorded at the beginning if recording costs time; the first of them warm up
STEPS_AT_FIRST = 8


@dataclass(eq=False)
class _Half:
    """One run of one half. `forward`: for a backward, its forward."""

    listener: MoveListener
    forward: _Half | None = None
    began: Any = None
    ended: Any = None
    #: buckets of gradients that ranks reduced meanwhile
    reductions: Sequence[SentBucket] = ()


class StepRecorder:
    """Records steps. `steps`: the program that runs; `waiting`: counts the forwards that wait for
    their backward; `names`: move → its name in a profile."""

    def __init__(
        self,
        name: str,
        clock: StepClock,
        waiting: Callable[[], int],
        steps: Sequence[ProgramStep] = (),
        names: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._clock, self._waiting = name, clock, waiting
        self._steps = tuple(steps)
        self._names = names or {}
        self._lock = threading.Lock()
        self._left = STEPS_AT_FIRST
        #: the forward that runs, or that waits for its backward
        self._forward: _Half | None = None
        self._kept: deque[_Half] = deque(maxlen=STEPS_KEPT)
        #: number of steps so far
        self.recorded = 0

    def watch(self, steps: int) -> None:
        with self._lock:
            self._left = max(self._left, steps)

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        """Wrap a run of one half (`inference`: of a whole graph)."""
        half = self._begin(phase)
        seen = profiling()
        heard = None if half is None else half.listener
        if heard is None and seen:
            heard = self._listener()
        about = profiled(f"offcompile {self._name} {phase}") if seen else nullcontext()
        with listening(heard), about:
            if half is None:
                yield
                return
            half.began = self._clock.start()
            yield
            half.ended = self._clock.start()
        if isinstance(self._clock, WallClock):  # by which reductions are timed
            half.reductions = since(half.began)
        if phase != FORWARD:
            self._kept.append(half)
            self.recorded += 1

    def _listener(self) -> MoveListener:
        return MoveListener(self._clock.start, self._names)

    def _begin(self, phase: str) -> _Half | None:
        """Start recording this run; None if it is not recorded."""
        with self._lock:
            waiting, self._forward = self._forward, None
            if phase == BACKWARD:
                if waiting is None or waiting.ended is None or self._waiting() != 1:
                    return None
                return _Half(self._listener(), waiting)
            if waiting is not None or (phase == FORWARD and self._waiting()):
                return None
            if not self._clock.free:
                if not self._left:
                    return None
                self._left -= 1
            half = _Half(self._listener())
            if phase == FORWARD:
                self._forward = half
            return half

    # --- evaluation -----------------------------------------------------------------------------

    def median(self) -> MeasuredStep | None:
        found = [step for last in tuple(self._kept) if (step := self._measured(last)) is not None]
        found.sort(key=lambda step: step.step_ns)
        return found[(len(found) - 1) // 2] if found else None

    def _measured(self, last: _Half) -> MeasuredStep | None:
        """Evaluate a step; None if the device has not finished it."""
        halves = (last,) if last.forward is None else (last.forward, last)
        try:
            return _Measuring(self._clock, halves, self._before).step()
        except _NotOver:
            return None

    @cached_property
    def _before(self) -> Mapping[tuple[str, bool], str]:
        """(move, True for its start) → the op that runs next after that step of the program."""
        found: dict[tuple[str, bool], str] = {}
        op = ""
        for step in reversed(self._steps):
            if isinstance(step, RunStep):
                op = step.name
            else:
                found[step.move, isinstance(step, StartStep)] = op
        return found


class _NotOver(Exception):
    pass


class _Measuring:
    """Converts instants of one step to ns since its start, without the gap between the halves."""

    def __init__(
        self, clock: StepClock, halves: Sequence[_Half], before: Mapping[tuple[str, bool], str]
    ) -> None:
        self.clock, self.halves, self.before = clock, halves, before
        self.turn_ns = self._since(halves[0].ended)
        self.gap_ns = self._since(halves[-1].began) - self.turn_ns if len(halves) > 1 else 0

    def step(self) -> MeasuredStep:
        phases = zip((FORWARD, BACKWARD), self.halves, strict=False)
        spans = [
            MeasuredSpan(phase, COMPUTE, self._at(half.began), self._at(half.ended))
            for phase, half in phases
        ]
        step_ns = spans[-1].end_ns
        waits = []
        for half in self.halves:
            for move, lane, began, ended in tuple(half.listener.copies):
                spans.append(MeasuredSpan(move, lane, self._at(began), self._at(ended)))
            for wait in tuple(half.listener.waits):
                start_ns = self._at(wait.began)
                op = self.before.get((wait.move, wait.starting), "")
                waits.append(MeasuredWait(op, wait.move, start_ns, self._at(wait.ended) - start_ns))
        spans += self._reductions()
        spans.sort(key=lambda span: (span.start_ns, span.end_ns))
        waits.sort(key=lambda wait: wait.start_ns)
        return MeasuredStep(tuple(spans), tuple(w for w in waits if w.duration_ns > 0), step_ns)

    def _reductions(self) -> Iterator[MeasuredSpan]:
        """Yield the buckets that came back, each once: one may be under way in both halves."""
        for one in dict.fromkeys(one for half in self.halves for one in half.reductions):
            if one.ended is not None:
                began, ended = self._at(one.began), self._at(one.ended)
                yield MeasuredSpan(one.name, REDUCTION, began, ended, one.nbytes)

    def _at(self, instant: Any) -> int:
        ns = self._since(instant)
        if ns > self.turn_ns and len(self.halves) > 1:
            ns = max(self.turn_ns, ns - self.gap_ns)
        return max(0, ns)

    def _since(self, instant: Any) -> int:
        ns = self.clock.between_ns(self.halves[0].began, instant)
        if ns is None:
            raise _NotOver
        return ns
