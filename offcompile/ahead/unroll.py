"""Extrapolates a step of many equal layers from a step of few, by repeating its periodic parts.

Two traces of the same model, with k and k−1 periods of its layers, differ by a few runs of ops that
only the longer one has: one in forward, one in backward, and sometimes others (tensors that
backward needs of all layers may be made at the end of forward). Around each such run the ops
repeat: from one period to the next, every operand is the same tensor, or the tensor made one period
later, or one period earlier. Copies of a period then stand for more layers. The same rule for one
period less must give the shorter trace, op by op and tensor by tensor; otherwise the extrapolation
is not exact, and is not used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from offcompile.ir import Op, Problem, Tensor

from .periods import Facts, PeriodWindow, find_windows, looks, shape_of, slots_of

#: change of an operand from one period to the next: none, one period later, one earlier
SAME, ALONG, AGAINST = 0, 1, -1
#: pinned tensors smaller than this may differ in size
SMALL_BYTES = 4096


@dataclass(frozen=True)
class Unrolled:
    problem: Problem
    #: op or tensor → its original in the traced problem, and the number of periods by which its
    #: module is shifted
    origin: dict[str, tuple[str, int]]


def unroll(larger: Problem, smaller: Problem, more: int) -> Unrolled | None:
    """Add `more` periods to `larger`. `smaller` is the same step with one period less than
    `larger`. None if the steps do not repeat exactly, or not in a known pattern."""
    windows = find_windows(larger, smaller)
    if windows is None:
        return None
    # ops before a window come from the lists of layers before it, or begin its own
    for tried in ([replace(w, lead=w.start) for w in windows], windows):
        facts = Facts(larger, tried)
        ways = _ways(facts, tried)
        if ways is None:
            continue
        if alike(_Unrolling(facts, tried, ways, -1).result().problem, smaller):
            return _Unrolling(facts, tried, ways, more).result()
    return None


def alike(one: Problem, other: Problem) -> bool:
    """True if two problems are equal except for names, the order of the list of tensors, and sizes
    of negligible tensors (such as one tensor with a random seed per layer)."""
    if len(one.ops) != len(other.ops) or len(one.tensors) != len(other.tensors):
        return False
    if one.steady != other.steady:
        return False
    twin: dict[str, str] = {}
    for a, b in zip(one.ops, other.ops, strict=True):
        if shape_of(a) != shape_of(b):
            return False
        for mine, theirs in zip(slots_of(a), slots_of(b), strict=True):
            if twin.setdefault(mine, theirs) != theirs:
                return False
    if len(set(twin.values())) != len(twin):
        return False
    if any(_rounded(one.tensor[a]) != _rounded(other.tensor[b]) for a, b in twin.items()):
        return False
    return _unused(one) == _unused(other)


def _rounded(tensor: Tensor) -> tuple[object, ...]:
    small = tensor.pinned and tensor.nbytes < SMALL_BYTES
    return looks(replace(tensor, nbytes=0) if small else tensor)


def _unused(problem: Problem) -> list[tuple[object, ...]]:
    used = {t for op in problem.ops for t in op.operands}
    return sorted((looks(t) for t in problem.tensors if t.id not in used), key=repr)


def relabelled(label: str, layers: str, shift: int, period: int) -> str:
    """Shift a label: `blocks.1.up 4×4` → `blocks.5.up 4×4` by two periods of two `layers`."""
    head = f"{layers}." if layers else ""
    at = f" {label}".find(f" {head}")
    if shift == 0 or at < 0:
        return label
    at += len(head)
    number = label[at:].partition(" ")[0].partition(".")[0]
    if not number.isdigit():
        return label
    return f"{label[:at]}{int(number) + shift * period}{label[at + len(number) :]}"


# --- from one period to the next -------------------------------------------------------------


@dataclass(frozen=True)
class _UnrollWays:
    #: (op of a window, operand) → the direction in which its tensor changes
    of: dict[tuple[int, int], int]
    #: pair of windows → their relative direction, inferred from operands
    between: dict[tuple[int, int], int]
    #: tensors that every period uses
    same: frozenset[str]


def _ways(facts: Facts, windows: Sequence[PeriodWindow]) -> _UnrollWays | None:
    """Find the direction of each operand; None if an operand has none."""
    of: dict[tuple[int, int], int] = {}
    between: dict[tuple[int, int], int] = {}
    same: set[str] = set()
    for u, window in enumerate(windows):
        for position in range(window.start, window.start + window.length):
            mine = slots_of(facts.ops[position])
            theirs = slots_of(facts.ops[position + window.length])
            for slot, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if a == b:
                    of[position, slot] = SAME
                    same.add(a)
                    continue
                at, (made, place) = facts.place[a], facts.place[b]
                v = facts.regions[made]
                if v is None or at[1] != place or looks(facts.tensor(a)) != looks(facts.tensor(b)):
                    return None
                step, length = made - at[0], windows[v].length
                if step not in (length, -length) or facts.regions[at[0]] != v:
                    return None
                of[position, slot] = way = ALONG if step > 0 else AGAINST
                if between.setdefault((u, v), way) != way:
                    return None
    return _UnrollWays(of, between, frozenset(same))


# --- repeating it ----------------------------------------------------------------------------


@dataclass(eq=False)
class _Unrolling:
    facts: Facts
    windows: Sequence[PeriodWindow]
    ways: _UnrollWays
    more: int
    tensors: dict[str, Tensor] = field(default_factory=dict)
    origin: dict[str, tuple[str, int]] = field(default_factory=dict)

    def result(self) -> Unrolled:
        problem = self.facts.problem
        ops = tuple(self._ops())
        used = {t for op in problem.ops for t in op.operands}
        tensors = (*self._in_order(), *(t for t in problem.tensors if t.id not in used))
        return Unrolled(replace(problem, tensors=tensors, ops=ops), self.origin)

    def _in_order(self) -> Iterator[Tensor]:
        """List tensors in the original order, copies right after their originals."""
        copies: dict[str, list[Tensor]] = {}
        for name, tensor in self.tensors.items():
            copies.setdefault(self.origin[name][0], []).append(tensor)
        for tensor in self.facts.problem.tensors:
            yield from copies.get(tensor.id, ())

    def _ops(self) -> Iterator[Op]:
        at = 0
        for window in self.windows:
            end = window.start + window.length
            yield from (self._op(i, None) for i in range(at, window.start))
            for copy in range(self.more + 1):
                yield from (self._op(i, copy) for i in range(window.start, end))
            at = end
        yield from (self._op(i, None) for i in range(at, len(self.facts.ops)))

    def _op(self, position: int, copy: int | None) -> Op:
        op = self.facts.ops[position]
        to = {t: self._operand(t, position, copy) for t in op.operands}
        return replace(
            op,
            id=self._named(op.id, position, copy),
            reads=tuple(to[t] for t in op.reads),
            writes=tuple(to[t] for t in op.writes),
            direct={to[t]: us for t, us in op.direct.items()},
        )

    def _operand(self, t: str, position: int, copy: int | None) -> str:
        """The tensor that replaces `t` in an op, or in one of its copies."""
        made, slot = self.facts.place[t]
        v = self.facts.regions[made]
        if v is None or t in self.ways.same:
            return self._tensor(made, slot, None)
        window = self.windows[v]
        period = window.period(made)
        shift = self._shift(t, position, copy, v, period)
        if shift is None:
            return self._tensor(made, slot, None)
        offset = (made - window.start) % window.length
        return self._at(window, period + shift, offset, slot)

    def _shift(self, t: str, position: int, copy: int | None, v: int, period: int) -> int | None:
        """The number of periods to shift an operand by, for the given copy of an op; None if the
        tensor belongs to no period."""
        u = self.facts.regions[position]
        if u is None:
            return 0
        window = self.windows[u]
        mine = window.period(position)
        if 0 <= mine <= window.last:
            twin = window.start + (position - window.start) % window.length
            way = self.ways.of[twin, slots_of(self.facts.ops[position]).index(t)]
            if copy is None:
                copy = self.more if mine > 0 else 0
            return copy if way == ALONG else self.more - copy
        if period > self.windows[v].last:  # tensors made after the layers stay after them
            return None
        if self._follows(u, v):
            return self.more if period >= 0 else 0
        way = ALONG if u == v else self.ways.between.get((u, v), ALONG)
        sees_last = (mine > 0) == (way == ALONG)
        return self.more if sees_last and period >= 0 else 0

    def _follows(self, u: int, v: int) -> bool:
        """True if one window has a beginning of its own behind the other, in the same half."""
        turn, mine, theirs = self.facts.turn, self.windows[u], self.windows[v]
        behind = mine.start > theirs.start and (mine.start < turn) == (theirs.start < turn)
        return behind and mine.lead < mine.start

    def _at(self, window: PeriodWindow, period: int, offset: int, slot: int) -> str:
        if 0 <= period <= self.more:
            return self._tensor(window.start + offset, slot, period)
        if period > self.more:
            period -= self.more
        return self._tensor(window.start + period * window.length + offset, slot, None)

    def _tensor(self, position: int, slot: int, copy: int | None) -> str:
        old = slots_of(self.facts.ops[position])[slot]
        # an operand may be first touched elsewhere: that place counts
        name = self._named(old, self.facts.place[old][0], copy)
        if name not in self.tensors:
            self.tensors[name] = replace(self.facts.tensor(old), id=name)
        return name

    def _named(self, old: str, position: int, copy: int | None) -> str:
        name = f"{old}~{copy}" if copy else old
        self.origin[name] = old, 0 if old in self.ways.same else self._layers_on(position, copy)
        return name

    def _layers_on(self, position: int, copy: int | None) -> int:
        u = self.facts.regions[position]
        if u is None:
            return 0
        # layers count up in forward: a window of backward runs against the one that it reads
        turn = self.facts.turn
        ahead = (v for v, w in enumerate(self.windows) if w.start < turn and v != u)
        ways = (self.ways.between.get((u, v)) for v in ahead)
        along = self.windows[u].start < turn or AGAINST not in ways
        if copy is None:
            period = self.windows[u].period(position)
            copy = self.more if period > 0 else 0
        return copy if along else self.more - copy
