"""Finds the periodic parts of a step: the runs of ops that only the longer of two traces has."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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

    @property
    def end(self) -> int:
        """The end of its last period."""
        return self.start + (self.last + 1) * self.length

    def period(self, position: int) -> int:
        """The period that an op belongs to; < 0: before all periods, > `last`: after them."""
        return (position - self.start) // self.length


@dataclass(eq=False)
class Facts:
    """A problem with the place of each tensor: the first op that touches it, and the operand slot
    in that op."""

    problem: Problem

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.problem.ops

    @cached_property
    def place(self) -> dict[str, tuple[int, int]]:
        found: dict[str, tuple[int, int]] = {}
        for i, op in enumerate(self.ops):
            for slot, t in enumerate(slots_of(op)):
                found.setdefault(t, (i, slot))
        return found

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple(shape_of(op) for op in self.ops)

    def tensor(self, name: str) -> Tensor:
        return self.problem.tensor[name]


def turn_of(problem: Problem) -> int:
    """Index of the first op after forward."""
    return next((i for i, op in enumerate(problem.ops) if op.phase != FORWARD), len(problem.ops))


def find_windows(facts: Facts, few: Facts) -> Iterator[list[PeriodWindow]]:
    """Find where the first problem has more periods than the second, in order: each way in which
    they may be divided. Nothing if the problems differ in other ways."""
    long, short = facts.shapes, few.shapes
    turn, smaller_turn = turn_of(facts.problem), turn_of(few.problem)
    forward = _runs(short[:smaller_turn], long[:turn], 0, MOST_WINDOWS)
    backward = _runs(short[smaller_turn:], long[turn:], 0, MOST_WINDOWS)
    if forward is None or backward is None or not (forward or backward):
        return
    runs = [*forward, *((turn + at, length) for at, length in backward)]
    steps = {0, *(unit for at, length in runs for unit in _units(long, at, length))}

    def divided(left: Sequence[tuple[int, int]], low: int) -> Iterator[list[PeriodWindow]]:
        if not left:
            yield []
            return
        (at, length), *others = left
        low, end = (low, turn) if at < turn else (max(low, turn), len(long))
        for parts in _Stretch(facts, long, low, end, at, steps).ways(length):
            behind = parts[-1].start + parts[-1].length
            yield from ([*parts, *rest] for rest in divided(others, behind))

    yield from divided(runs, 0)


def begun_later(
    facts: Facts, windows: Sequence[PeriodWindow], index: int, start: int
) -> PeriodWindow | None:
    """The window with that index, but from `start` on; None if two equal periods are not left."""
    length, last = windows[index].length, 0
    end = windows[index + 1].start if index + 1 < len(windows) else len(facts.ops)
    like = facts.shapes[start : start + length]
    while start + (last + 2) * length <= end:
        at = start + (last + 1) * length
        if facts.shapes[at : at + length] != like:
            break
        last += 1
    return PeriodWindow(start, length, last) if last > 0 else None


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


def _units(shapes: Sequence[Shape], at: int, length: int) -> list[int]:
    """The length of a run, and those of the equal parts that it may consist of."""
    run = shapes[at : at + length]
    units = [length // k for k in range(1, MOST_WINDOWS + 1) if length % k == 0]
    return [unit for unit in units if all(run[i] == run[i - unit] for i in range(length))]


@dataclass(frozen=True)
class _Stretch:
    """Ops from `low` to `end`, in which an extra run begins `at` an op."""

    facts: Facts
    shapes: Sequence[Shape]
    low: int
    end: int
    at: int
    #: distances between equal operands of one period and the next
    steps: set[int]

    def ways(self, length: int) -> Iterator[list[PeriodWindow]]:
        """Find the periodic part around the run. It may be several parts that have the same ops,
        one behind the other: encoder and decoder may each have some of them at the end of forward.
        """
        if (whole := self._whole(length)) is not None:
            yield [whole]
        for unit in _units(self.shapes, self.at, length)[1:]:
            found = sorted(self._runs_of(unit), key=lambda w: w.last, reverse=True)
            if len(found) * unit >= length:
                yield sorted(found[: length // unit], key=lambda w: w.start)

    def _whole(self, length: int) -> PeriodWindow | None:
        """Find the earliest period around the run that has the same ops as the next period, with
        operands that are equal or one of these steps apart."""
        start, shapes = self._start(length), self.shapes
        while start + 2 * length <= self.end:
            like = shapes[start : start + length]
            if like != shapes[start + length : start + 2 * length]:
                return None
            if all(self._follows(i, length) for i in range(start, start + length)):
                last = 1
                while shapes[start + (last + 1) * length : start + (last + 2) * length] == like:
                    last += 1
                return PeriodWindow(start, length, last)
            start += 1
        return None

    def _runs_of(self, length: int) -> list[PeriodWindow]:
        """Find periodic parts by their operands alone, which stay equally far apart."""
        found: list[PeriodWindow] = []
        start = self._start(length)
        for at in range(start, self.end):
            like = at + length < self.end and self.shapes[at] == self.shapes[at + length]
            follows = like and self._follows(at, length)
            if not follows or (
                at - start >= length and self._apart(at, length) != self._apart(at - length, length)
            ):
                if at - start >= length:
                    found.append(PeriodWindow(start, length, (at - start) // length))
                start = at if follows else at + 1
            if not like:
                break
        return found

    def _apart(self, one: int, length: int) -> list[int]:
        """Find how far apart the operands of an op and those of one period later are made."""
        ops, place = self.facts.ops, self.facts.place
        pairs = zip(slots_of(ops[one]), slots_of(ops[one + length]), strict=True)
        return [place[b][0] - place[a][0] for a, b in pairs]

    def _start(self, length: int) -> int:
        """The first op from which on ops are like those one period later."""
        start = self.at - length
        while start > self.low and self.shapes[start - 1] == self.shapes[start - 1 + length]:
            start -= 1
        return start

    def _follows(self, one: int, length: int) -> bool:
        return _follows(self.facts, one, one + length, self.steps)


def _follows(facts: Facts, one: int, other: int, steps: set[int]) -> bool:
    for a, b in zip(slots_of(facts.ops[one]), slots_of(facts.ops[other]), strict=True):
        (i, slot), (j, place) = facts.place[a], facts.place[b]
        if a != b and (slot != place or abs(j - i) not in steps):
            return False
        if looks(facts.tensor(a)) != looks(facts.tensor(b)):
            return False
    return True
