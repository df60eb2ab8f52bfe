"""Moves that arrive too late for the ops that wait for them, at any speed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from offcompile.ir.errors import Violation
from offcompile.ir.plan import Move, Plan

from .order import VerifiedRun, touches


def check_order(runs: Sequence[VerifiedRun], plan: Plan) -> Iterator[Violation]:
    """Checks for late moves and circular triggers. Every name of the plan must be known."""
    run = {r.id: r for r in runs}
    moves = {m.id: m for m in plan.moves}
    after = _Successors(runs)
    for move in plan.moves:
        chain, end = _chain(move, moves)
        where = f"move {move.id}"
        if end is None and chain[-1].start_after is not None:
            if chain[-1].start_after == move.id:
                names = " → ".join(m.id for m in chain)
                yield Violation("deadlock", where, f"its triggers go in a circle: {names}")
            continue
        if end is None or move.wraps or move.ready_before is None:
            continue
        reader = run[move.ready_before]
        if after.includes(reader, run[end]):
            via = " → ".join(reversed([m.id for m in chain[1:]]))
            detail = (
                f"starts after {end}{' (through ' + via + ')' if via else ''}, which cannot end "
                f"before {reader.id} begins, yet {reader.id} waits for it"
            )
            yield Violation("late-move", where, detail)


def _chain(move: Move, moves: dict[str, Move]) -> tuple[list[Move], str | None]:
    """The moves that trigger `move`, itself first, and the op or recomputation at the end.

    In a circle the last move of the chain names one that is already in it.
    """
    chain, seen = [move], {move.id}
    while chain[-1].start_after in moves:
        following = moves[chain[-1].start_after]
        if following.id in seen:
            return chain, None
        chain.append(following)
        seen.add(following.id)
    return chain, chain[-1].start_after


class _Successors:
    """The runs that cannot start before a given run has ended.

    The compute lane and the host lane each keep the listed order; across the two lanes, only runs
    that touch the same tensor do.
    """

    def __init__(self, runs: Sequence[VerifiedRun]) -> None:
        self._runs = runs
        self._touching = touches(runs)
        self._next_on_lane: dict[int, int] = {}
        last: dict[bool, int] = {}
        for run in runs:
            if run.on_host in last:
                self._next_on_lane[last[run.on_host]] = run.position
            last[run.on_host] = run.position
        self._reached: dict[int, frozenset[int]] = {}

    def includes(self, first: VerifiedRun, then: VerifiedRun) -> bool:
        """True if `then` is `first`, or cannot start before `first` has ended."""
        if not first.on_host and not then.on_host:
            return then.position >= first.position
        if first.position not in self._reached:
            self._reached[first.position] = self._reach(first)
        return then.position in self._reached[first.position]

    def _reach(self, first: VerifiedRun) -> frozenset[int]:
        seen, waiting = {first.position}, [first.position]
        while waiting:
            at = waiting.pop()
            following = {self._next_on_lane[at]} if at in self._next_on_lane else set()
            for tensor in self._runs[at].op.operands:
                later = (t.run.position for t in self._touching[tensor] if t.run.position > at)
                following.update(later)
            waiting += following - seen
            seen |= following
        return frozenset(seen)
