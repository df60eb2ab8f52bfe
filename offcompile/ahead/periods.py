"""Finds the periodic parts of a step: the runs of ops that only the longer of two traces has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offcompile.ir import Op, Problem, Tensor

FORWARD = "forward"
#: most extra runs of ops to look for in one half of the longer trace
MOST_WINDOWS = 4

Shape = tuple[object, ...]


def slots_of(op: Op) -> tuple[str, ...]:
    """The operands of an op with repetitions, reads first."""
    return op.reads + op.writes


def shape_of(op: Op) -> Shape:
    """The properties of an op other than its tensors."""
    direct = tuple(op.direct.get(t) for t in slots_of(op))
    counts = len(op.reads), len(op.writes)
    costs = op.duration_us, op.workspace_bytes, op.host_duration_us
    return op.phase, op.recompute, counts, costs, direct


def looks(tensor: Tensor) -> tuple[object, ...]:
    """The properties of a tensor other than its name."""
    ratios = tuple(sorted(tensor.ratios.items()))
    return tensor.nbytes, tensor.kind, tensor.home, tensor.pinned, ratios


@dataclass(frozen=True)
class PeriodWindow:
    """A periodic part of a step, whose first period is `length` ops from `start` on."""

    start: int
    length: int
    #: index of the last equal period, counted from 0
    last: int
    #: the ops from here to `start` are like those one period later, but for their operands
    lead: int

    def period(self, position: int) -> int:
        """The period that an op belongs to; < 0: before all periods, > `last`: after them."""
        return (position - self.start) // self.length


@dataclass(eq=False)
class Facts:
    """A problem with the place of each tensor: the first op that touches it, and the operand slot
    in that op."""

    problem: Problem
    #: its periodic parts, once they are known
    windows: Sequence[PeriodWindow] = ()

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.problem.ops

    @cached_property
    def turn(self) -> int:
        return turn_of(self.problem)

    @cached_property
    def place(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for i, op in enumerate(self.ops):
            for slot, t in enumerate(slots_of(op)):
                found.setdefault(t, (i, slot))
        return found

    def tensor(self, name: str) -> Tensor:
        return self.problem.tensor[name]

    @cached_property
    def regions(self) -> list[int | None]:
        """For each op the window that it is in or leads to, or else the one that it follows, or
        else the first, in the same half of the step; None if this half has no window."""
        return [self._region(i) for i in range(len(self.ops))]

    def _region(self, position: int) -> int | None:
        windows = self.windows
        half = [i for i, w in enumerate(windows) if (w.start < self.turn) == (position < self.turn)]
        before = [i for i in half if windows[i].lead <= position]
        return before[-1] if before else next(iter(half), None)


def turn_of(problem: Problem) -> int:
    """Index of the first op after forward."""
    return next((i for i, op in enumerate(problem.ops) if op.phase != FORWARD), len(problem.ops))


def find_windows(larger: Problem, smaller: Problem) -> list[PeriodWindow] | None:
    """Find where `larger` has more periods than `smaller`, in order; None if they differ in other
    ways."""
    long, short = ([shape_of(op) for op in p.ops] for p in (larger, smaller))
    turns = turn_of(larger), turn_of(smaller)
    facts = Facts(larger)
    runs: list[tuple[int, int, int]] = []
    for first, end, given in (
        (0, turns[0], short[: turns[1]]),
        (turns[0], len(long), short[turns[1] :]),
    ):
        found = _runs(given, long[first:end], 0, MOST_WINDOWS)
        if found is None:
            return None
        runs += [(first + at, length, end) for at, length in found]
    steps = {0, *(length for _, length, _ in runs)}
    windows: list[PeriodWindow] = []
    for at, length, end in runs:
        low = windows[-1].start + windows[-1].length if windows else 0
        low = max(low, 0 if at < turns[0] else turns[0])
        window = _first(facts, long, low, end, at, length, steps)
        if window is None:
            return None
        windows.append(window)
    return windows or None


def _runs(
    short: Sequence[Shape], long: Sequence[Shape], at: int, left: int
) -> list[tuple[int, int]] | None:
    """Position and length of each extra run of `long`; each equals the run before it."""
    at = next((i for i in range(at, len(short)) if short[i] != long[i]), len(short))
    missing = len(long) - len(short)
    if missing == 0:
        return [] if at == len(short) else None
    if left == 0 or missing < 0:
        return None
    for length in range(min(missing, at), 0, -1):
        if long[at - length : at] == long[at : at + length]:
            rest = _runs(short, [*long[:at], *long[at + length :]], at, left - 1)
            if rest is not None:
                return [(at, length), *((p + length, n) for p, n in rest)]
    return None


def _first(
    facts: Facts,
    shapes: Sequence[Shape],
    low: int,
    end: int,
    at: int,
    length: int,
    steps: set[int],
) -> PeriodWindow | None:
    """Find the earliest period around a run that has the same ops as the next period, with operands
    that are equal or one of these steps apart."""
    start = at - length
    while start > low and shapes[start - 1] == shapes[start - 1 + length]:
        start -= 1
    lead = start
    while start + 2 * length <= end:
        like = shapes[start : start + length]
        if like != shapes[start + length : start + 2 * length]:
            return None
        if all(_follows(facts, i, i + length, steps) for i in range(start, start + length)):
            last = 1
            while shapes[start + (last + 1) * length : start + (last + 2) * length] == like:
                last += 1
            return PeriodWindow(start, length, last, lead)
        start += 1
    return None


def _follows(facts: Facts, one: int, other: int, steps: set[int]) -> bool:
    for a, b in zip(slots_of(facts.ops[one]), slots_of(facts.ops[other]), strict=True):
        (i, slot), (j, place) = facts.place[a], facts.place[b]
        if a != b and (slot != place or abs(j - i) not in steps):
            return False
        if looks(facts.tensor(a)) != looks(facts.tensor(b)):
            return False
    return True
