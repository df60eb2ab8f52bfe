"""Extrapolates a step of many equal layers from a step of few, by repeating its periodic parts.

Two traces of the same model, with k and k−1 periods of its layers, differ by a few runs of ops that
only the longer one has: one in forward, one in backward, and sometimes others (tensors that
backward needs of all layers may be made at the end of forward). Around each such run the ops
repeat. The first period of each periodic part is copied for the layers that are missing; all other
ops are kept. The traces tell where each op finds its operands:

- An op that is copied has, from one period to the next, the same operand, or the tensor made one
  period later, or one period earlier. Its copies go on like that.
- An op that is kept is in both traces. Its operand is a tensor that is kept, or it counts periods
  from the first one, or from the last one, whichever is true in both.

The first op that is kept behind the copies must find what one more copy would. If any operand is
found in no such way, the extrapolation is not exact, and is not used. The shorter trace must also
come out, op by op and tensor by tensor, if the same rules are applied to one period less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import islice

from offcompile.ir import Op, Problem, Tensor

from .periods import Facts, PeriodWindow, begun_later, find_windows, looks, shape_of, slots_of
from .scaled import line_up

#: most ways to divide a step into periodic parts that are tried
MOST_WAYS = 16
#: pinned tensors smaller than this may differ in size
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Unrolled:
    problem: Problem
    #: op or tensor → its original in the larger problem, and the number of the copy (None: kept)
    origin: dict[str, tuple[str, int | None]]
    #: op or tensor that is kept → the same in the smaller problem
    twin: dict[str, str]
    #: op or tensor that is copied → the same one period later
    later: dict[str, str]
    _pattern: _Pattern
    _more: int

    def like(self, few: Problem) -> Unrolled | None:
        """Add as many periods to `few`, which is the larger problem with other sizes, durations or
        homes, as with another batch. None if its ops and tensors are not the same, or do not
        repeat."""
        if not line_up(self._pattern.larger.problem, few):
            return None
        pattern = replace(self._pattern, larger=Facts(few))
        try:
            made = _Unrolling(pattern, self._more).problem() if pattern.repeats else None
        except _Irregular:
            return None
        return None if made is None else replace(self, problem=made, _pattern=pattern)


def unroll(larger: Problem, smaller: Problem, more: int) -> Unrolled | None:
    """Add `more` periods to `larger`. `smaller` is the same step with one period less than
    `larger`. None if the steps do not repeat exactly, or not in a known pattern."""
    pattern = _find_pattern(Facts(larger), Facts(smaller))
    if pattern is None:
        return None
    try:
        twin = _matched(_Unrolling(pattern, -1).problem(), smaller)
        if twin is None:
            return None
        unrolling = _Unrolling(pattern, more)
        made = unrolling.problem()
        return Unrolled(made, unrolling.origin, twin, pattern.later(), pattern, more)
    except _Irregular:
        return None


def alike(one: Problem, other: Problem) -> bool:
    """True if two problems are equal except for names, the order of the list of tensors, and sizes
    of negligible tensors (such as one tensor with a random seed per layer)."""
    return _matched(one, other) is not None


def _matched(one: Problem, other: Problem) -> dict[str, str] | None:
    """Map the ops and tensors of a problem to those of one that is alike; None if it is not."""
    if len(one.ops) != len(other.ops) or len(one.tensors) != len(other.tensors):
        return None
    if one.steady != other.steady:
        return None
    twin: dict[str, str] = {}
    for a, b in zip(one.ops, other.ops, strict=True):
        if shape_of(a) != shape_of(b):
            return None
        for mine, theirs in zip(slots_of(a), slots_of(b), strict=True):
            if twin.setdefault(mine, theirs) != theirs:
                return None
    if len(set(twin.values())) != len(twin):
        return None
    if any(_rounded(one.tensor[a]) != _rounded(other.tensor[b]) for a, b in twin.items()):
        return None
    if _unused(one) != _unused(other):
        return None
    return {a.id: b.id for a, b in zip(one.ops, other.ops, strict=True)} | twin


def _rounded(tensor: Tensor) -> tuple[object, ...]:
    small = tensor.pinned and tensor.nbytes < SMALL_BYTES
    return looks(replace(tensor, nbytes=0) if small else tensor)


def _unused(problem: Problem) -> list[tuple[object, ...]]:
    used = {t for op in problem.ops for t in op.operands}
    return sorted((looks(t) for t in problem.tensors if t.id not in used), key=repr)


# --- where ops find their operands -----------------------------------------------------------


class _Irregular(Exception):
    """Raised if an operand is found in no known way."""


class _Way(Enum):
    """Where an op finds a tensor that some period makes."""

    #: in that period, counted from the first one
    FROM_FIRST = "from first"
    #: in that period, counted from the last one
    FROM_LAST = "from last"
    #: one period later in each copy
    ALONG = "along"
    #: one period earlier in each copy
    AGAINST = "against"


@dataclass(frozen=True)
class _Source:
    """An operand: the tensor that the larger problem has there, its place, and the window that
    makes it with the way in which it does (None: it is always this tensor)."""

    tensor: str
    place: tuple[int, int]
    window: PeriodWindow | None = None
    way: _Way = _Way.FROM_FIRST


def _find_pattern(larger: Facts, smaller: Facts) -> _Pattern | None:
    """Find periods of which all operands are found in a known way; None if there are none."""
    for windows in islice(find_windows(larger, smaller), MOST_WAYS):
        found = _pattern_of(larger, smaller, windows)
        if found is not None:
            return found
    return None


def _pattern_of(larger: Facts, smaller: Facts, windows: Sequence[PeriodWindow]) -> _Pattern | None:
    """Begin windows later until they hold no ops of layers that differ."""
    while True:
        pattern = _Pattern(larger, smaller, windows)
        if len(pattern.kept) != len(smaller.ops):
            return None
        irregular = pattern.irregular()
        if not irregular:
            return pattern
        starts = pattern.starts_behind(irregular)
        begun = [
            begun_later(larger, windows, i, starts[i]) if i in starts else window
            for i, window in enumerate(windows)
        ]
        windows = [window for window in begun if window is not None]
        if not starts or len(windows) < len(begun):
            return None


@dataclass(eq=False)
class _Pattern:
    """The account that two traces give of the ops that are kept, and of those that are copied."""

    larger: Facts
    smaller: Facts
    windows: Sequence[PeriodWindow]
    #: window by position, in its periods
    _inside: dict[int, PeriodWindow] = field(default_factory=dict, init=False)
    #: window by position, in its first period: these ops are copied
    copied: dict[int, PeriodWindow] = field(default_factory=dict, init=False)
    #: positions of ops that are kept, which are those of the smaller problem
    kept: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        for window in self.windows:
            for position in range(window.start, window.end):
                self._inside[position] = window
                if position < window.start + window.length:
                    self.copied[position] = window
        self.kept = [i for i in range(len(self.larger.ops)) if i not in self.copied]
        self._image = {position: i for i, position in enumerate(self.kept)}

    @property
    def repeats(self) -> bool:
        """True if each op that is copied takes as long one period later."""
        ops = self.larger.ops
        return all(
            shape_of(ops[position]) == shape_of(ops[position + window.length])
            for position, window in self.copied.items()
        )

    def irregular(self) -> list[int]:
        """Find the ops whose operands are found in no known way."""
        found: list[int] = []
        for position in range(len(self.larger.ops)):
            try:
                self.sources(position)
            except _Irregular:
                found.append(position)
        return found

    def starts_behind(self, irregular: Sequence[int]) -> dict[int, int]:
        """Map each window with irregular ops to the first start behind them all."""
        found: dict[int, int] = {}
        for i, window in enumerate(self.windows):
            inside = (p for p in irregular if self._inside.get(p) is window)
            offsets = [(p - window.start) % window.length for p in inside]
            if offsets:
                found[i] = window.start + max(offsets) + 1
        return found

    def later(self) -> dict[str, str]:
        """Map each op and tensor that is copied to the same one period later."""
        found: dict[str, str] = {}
        for position, window in self.copied.items():
            op, next_op = self.larger.ops[position], self.larger.ops[position + window.length]
            for mine, theirs in zip(slots_of(op), slots_of(next_op), strict=True):
                if self.larger.place[mine][0] == position:
                    found[mine] = theirs
            found[op.id] = next_op.id
        return found

    def sources(self, position: int) -> list[_Source]:
        """Tell where the op finds each of its operands."""
        slots = range(len(slots_of(self.larger.ops[position])))
        if position in self.copied:
            return [self._of_copied(position, slot) for slot in slots]
        return [self._of_kept(position, slot) for slot in slots]

    def _of_kept(self, position: int, slot: int) -> _Source:
        mine = slots_of(self.larger.ops[position])[slot]
        theirs = slots_of(self.smaller.ops[self._image[position]])[slot]
        place, (made, made_slot) = self.larger.place[mine], self.smaller.place[theirs]
        there = self.kept[made]
        if place[1] != made_slot:
            raise _Irregular
        if there == place[0]:
            return _Source(mine, place)
        window = self._inside.get(place[0])
        if window is not None and there == place[0] + window.length:
            # a tensor that no op makes is first touched by some period, and read by all of them
            constant = slots_of(self.larger.ops[there])[made_slot] == mine
            return _Source(mine, place, None if constant else window, _Way.FROM_FIRST)
        if place[0] in self.copied and there == place[0] - self.copied[place[0]].length:
            return _Source(mine, place, self.copied[place[0]], _Way.FROM_LAST)
        raise _Irregular

    def _of_copied(self, position: int, slot: int) -> _Source:
        after = position + self.copied[position].length
        next_source = self._of_kept(after, slot)
        mine, theirs = slots_of(self.larger.ops[position])[slot], next_source.tensor
        if mine == theirs:
            return next_source
        place, (made, made_slot) = self.larger.place[mine], next_source.place
        step = made - place[0]
        window = self._inside.get(made) or self._inside.get(place[0])
        if place[1] != made_slot or window is None or abs(step) != window.length:
            raise _Irregular
        if looks(self.larger.tensor(mine)) != looks(self.larger.tensor(theirs)):
            raise _Irregular
        period = window.period(made)
        if step > 0 and _counts_from_last(next_source, period):
            return _Source(mine, place, window, _Way.ALONG)
        if step < 0 and _counts_from_first(next_source, period):
            return _Source(mine, place, window, _Way.AGAINST)
        raise _Irregular


def _counts_from_last(source: _Source, period: int) -> bool:
    return period > 0 if source.window is None else source.way is _Way.FROM_LAST


def _counts_from_first(source: _Source, period: int) -> bool:
    return period < 0 if source.window is None else source.way is _Way.FROM_FIRST


# --- repeating it ----------------------------------------------------------------------------


@dataclass(eq=False)
class _Unrolling:
    pattern: _Pattern
    more: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    origin: dict[str, tuple[str, int | None]] = field(default_factory=dict)

    def problem(self) -> Problem:
        problem = self.pattern.larger.problem
        ops = tuple(self._ops())
        used = {t for op in problem.ops for t in op.operands}
        tensors = (*self._in_order(), *(t for t in problem.tensors if t.id not in used))
        return replace(problem, tensors=tensors, ops=ops)

    def _in_order(self) -> Iterator[Tensor]:
        """List tensors in the original order, copies right after their originals."""
        copies: dict[str, list[Tensor]] = {}
        for name, tensor in self.tensors.items():
            copies.setdefault(self.origin[name][0], []).append(tensor)
        for tensor in self.pattern.larger.problem.tensors:
            yield from copies.get(tensor.id, ())

    def _ops(self) -> Iterator[Op]:
        position, ops = 0, self.pattern.larger.ops
        while position < len(ops):
            window = self.pattern.copied.get(position)
            if window is None:
                yield self._op(position, self.pattern.sources(position), None)
                position += 1
                continue
            end = window.start + window.length
            sources = {i: self.pattern.sources(i) for i in range(position, end)}
            for copy in range(self.more + 1):
                yield from (self._op(i, sources[i], copy) for i in sources)
            position = end

    def _op(self, position: int, sources: Sequence[_Source], copy: int | None) -> Op:
        op = self.pattern.larger.ops[position]
        to: dict[str, str] = {}
        for source in sources:
            name = self._operand(source, copy)
            if to.setdefault(source.tensor, name) != name:
                raise _Irregular
        return replace(
            op,
            id=self._named(op.id, copy),
            reads=tuple(to[t] for t in op.reads),
            writes=tuple(to[t] for t in op.writes),
            direct={to[t]: us for t, us in op.direct.items()},
        )

    def _operand(self, source: _Source, copy: int | None) -> str:
        """The tensor that an op, or one of its copies, finds there."""
        window, (made, slot) = source.window, source.place
        if window is None:
            return self._tensor(made, slot, None)
        period = window.period(made)
        if source.way is _Way.FROM_LAST:
            period += self.more
        elif source.way is not _Way.FROM_FIRST:
            assert copy is not None
            period += copy if source.way is _Way.ALONG else self.more - copy
        first = window.start + (made - window.start) % window.length
        if 0 <= period <= self.more:
            return self._tensor(first, slot, period)
        if period > self.more:
            period -= self.more
        return self._tensor(first + period * window.length, slot, None)

    def _tensor(self, position: int, slot: int, copy: int | None) -> str:
        facts = self.pattern.larger
        if not 0 <= position < len(facts.ops):
            raise _Irregular
        operands = slots_of(facts.ops[position])
        if slot >= len(operands) or facts.place[operands[slot]] != (position, slot):
            raise _Irregular
        old = operands[slot]
        name = self._named(old, copy)
        if name not in self.tensors:
            self.tensors[name] = replace(facts.tensor(old), id=name)
        return name

    def _named(self, old: str, copy: int | None) -> str:
        name = f"{old}~{copy}" if copy else old
        self.origin[name] = old, copy
        return name
