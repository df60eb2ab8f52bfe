"""Records the graph executions of a training step.

    enter(name, …) → saved(block, …), read(block) … → leave(); dead(block) when a tensor has died.

A step begins when an execution starts while no saved tensor is alive. So a table of the step needs
to know nothing about earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

#: a step with more executions is not recorded
MOST_EXECUTIONS = 4096


class TensorKey(NamedTuple):
    """A saved tensor: the position of the execution that saved it, and its number there."""

    born: int
    number: int


@dataclass(frozen=True)
class Execution:
    """Names the tensors that one run of a graph's half saves, and those that it reads."""

    name: Hashable
    backward: bool
    #: True if its plan's peak includes every tensor that it saves or reads
    counts_own: bool
    #: tag and bytes of each tensor, in the order in which they are made
    saved: tuple[tuple[str, int], ...] = ()
    read: tuple[TensorKey, ...] = ()


class Measured(NamedTuple):
    """How long an execution took, to the start of the next one, and the bytes that it left free
    for saved tensors (those of its own not counted, where `counts_own`)."""

    duration_us: float
    room_bytes: int


@dataclass(frozen=True)
class RecordedStep:
    """A whole step. Two records describe the same step if their executions are equal."""

    executions: tuple[Execution, ...]
    measured: tuple[Measured, ...] = field(compare=False)
    #: time from the end of the last execution to the start of the next step: the optimizer
    after_us: float = field(default=0.0, compare=False)

    @cached_property
    def names(self) -> tuple[Hashable, ...]:
        return tuple(e.name for e in self.executions)

    @cached_property
    def wanted(self) -> frozenset[TensorKey]:
        """Tensors that a later execution reads."""
        return frozenset(key for e in self.executions for key in e.read)

    def nbytes(self, key: TensorKey) -> int:
        return self.executions[key.born].saved[key.number][1]

    def own_bytes(self, position: int) -> int:
        """Bytes of the tensors that an execution saves or reads, if its plan's peak counts them."""
        run = self.executions[position]
        if not run.counts_own:
            return 0
        return sum(nbytes for _, nbytes in run.saved) + sum(map(self.nbytes, run.read))

    def merged(self, other: RecordedStep) -> RecordedStep:
        """The same step as seen twice. It has the shorter times, which waits disturb least, and the
        smaller rooms, which were there both times."""
        pairs = zip(self.measured, other.measured, strict=True)
        return replace(
            self,
            measured=tuple(
                Measured(min(a.duration_us, b.duration_us), min(a.room_bytes, b.room_bytes))
                for a, b in pairs
            ),
            after_us=min(self.after_us, other.after_us),
        )

    def with_rooms(self, changed: Callable[[int], int]) -> RecordedStep:
        """The same step where every execution leaves `changed(room_bytes)`."""
        rooms = (Measured(m.duration_us, changed(m.room_bytes)) for m in self.measured)
        return replace(self, measured=tuple(rooms))


@dataclass
class _Running:
    name: Hashable
    backward: bool
    counts_own: bool
    room_bytes: int
    began_us: float
    saved: list[tuple[str, int]] = field(default_factory=list)
    read: dict[TensorKey, None] = field(default_factory=dict)


class StepRecord:
    """The step that runs. `clock_us` should not count the time that runs wait for copies."""

    def __init__(self, clock_us: Callable[[], float]) -> None:
        self._clock_us = clock_us
        self._runs: list[_Running] = []
        self._alive: dict[Hashable, TensorKey] = {}
        self._blocks: dict[TensorKey, Hashable] = {}
        self._ended_us = 0.0
        self._spoilt = False

    @property
    def position(self) -> int:
        """The position of the running execution in its step."""
        return len(self._runs) - 1

    @property
    def begins(self) -> bool:
        """True if an execution that starts now starts a step."""
        return not self._alive

    def enter(
        self, name: Hashable, room_bytes: int, backward: bool, counts_own: bool
    ) -> RecordedStep | None:
        """Start an execution. Returns the step before if this one starts a new step."""
        now_us, done = self._clock_us(), None
        if self.begins:
            done = self._done(now_us)
            self._runs.clear()
            self._blocks.clear()
            self._spoilt = False
        if len(self._runs) >= MOST_EXECUTIONS:
            self._spoilt = True  # positions begin again, but nothing is made of them
            self._runs.clear()
            self._blocks.clear()
        self._runs.append(_Running(name, backward, counts_own, room_bytes, now_us))
        return done

    def leave(self) -> None:
        self._ended_us = self._clock_us()

    def saved(self, block: Hashable, tag: str, nbytes: int) -> TensorKey:
        """Note a tensor that the running execution saves; its name while it lives is `block`."""
        run = self._runs[-1]
        key = TensorKey(self.position, len(run.saved))
        run.saved.append((tag, nbytes))
        self._alive[block] = key
        self._blocks[key] = block
        return key

    def read(self, block: Hashable) -> TensorKey | None:
        """Note a read by the running execution. None if the tensor is of no step. A tensor that the
        execution saved itself does not travel between executions, and is no read of the step."""
        key = self._alive.get(block)
        if key is not None and self._runs and key.born != self.position:
            self._runs[-1].read[key] = None
        return key

    def dead(self, block: Hashable) -> None:
        self._alive.pop(block, None)

    def block_of(self, key: TensorKey) -> Hashable | None:
        """The name of a tensor that is alive."""
        block = self._blocks.get(key)
        return block if block is not None and self._alive.get(block) == key else None

    def rooms_change(self, changed: Callable[[int], int]) -> None:
        for run in self._runs:
            run.room_bytes = changed(run.room_bytes)

    def spoil(self) -> None:
        """Leave this step out: it uses the room for more than saved tensors."""
        self._spoilt = True

    def _done(self, now_us: float) -> RecordedStep | None:
        if self._spoilt or not any(run.read for run in self._runs):
            return None
        runs = self._runs
        ends = [run.began_us for run in runs[1:]] + [self._ended_us]
        return RecordedStep(
            tuple(
                Execution(r.name, r.backward, r.counts_own, tuple(r.saved), tuple(r.read))
                for r in runs
            ),
            tuple(
                Measured(max(0.0, end - r.began_us), r.room_bytes)
                for r, end in zip(runs, ends, strict=True)
            ),
            max(0.0, now_us - self._ended_us),
        )
