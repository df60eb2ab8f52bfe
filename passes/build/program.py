"""The order of a step: every run of an op, and the accesses to each tensor.

Positions count the runs of a step, recomputations and host updates included. In a steady problem
the accesses form a ring: the last one of a step is followed by the first one of the next.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from offcompile.ir import DEVICE, HOST, Direct, Infeasible, Op, Problem, Recompute, Start, Update

from .decisions import Away, Decisions


class Access(NamedTuple):
    """One run's use of one tensor on one tier. `name` None: the state at the start of the step."""

    position: int
    name: str | None
    tier: str
    reads: bool
    writes: bool


#: builds an `Access` fast
_access = tuple.__new__


@dataclass(frozen=True, slots=True)
class RunOf:
    """One run in the step: an op, a recomputation or a host update."""

    name: str
    op: Op
    duration_us: float
    on_host: bool


class Program:
    """The runs of a problem under given direct accesses, recomputations and host updates."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        self.problem = problem
        #: cached residencies of tensors under earlier decisions (`residency`)
        self.residencies: dict[tuple[str, tuple[Away, ...] | None], Any] = {}
        directs: dict[str, set[str]] = {}
        for d in decisions.directs:
            directs.setdefault(d.op, set()).add(d.tensor)
        again: dict[str, list[str]] = {}
        for r in decisions.recomputes:
            again.setdefault(r.before, []).append(r.op)
        hosted = {u.weight for u in decisions.updates if u.where == HOST}
        self.runs: list[RunOf] = []
        #: cached initial copies: by tensor and tier
        self.starts: dict[tuple[str, str], Start] = {}
        #: cached gaps (`gaps`)
        self.gaps: dict[tuple[object, ...], Any] = {}
        #: per run: bytes needed if all operands are on the device
        self._plain_bytes: list[int | None] = []
        self.accesses: dict[str, list[Access]] = {t.id: [] for t in problem.tensors}
        at, none = problem.op_index, frozenset[str]()
        for i, op in enumerate(problem.ops):
            if op.id in again:
                for name in sorted(again[op.id], key=at.__getitem__):
                    self._add(f"{name}@{op.id}", at[name], directs.get(name, none), False)
            on_host = op.phase == "update" and not hosted.isdisjoint(op.writes)
            self._add(op.id, i, directs.get(op.id, none), on_host)

    @classmethod
    def of(cls, problem: Problem, decisions: Decisions) -> Program:
        """Returns the program of these decisions, cached if it was built recently."""
        known = problem.once(_lately)
        asked = decisions.directs, decisions.recomputes, decisions.updates
        found = known.pop(asked, None) or cls(problem, decisions)
        known[asked] = found
        if len(known) > MOST_PROGRAMS:
            del known[next(iter(known))]
        return found

    def _add(self, name: str, index: int, direct: Collection[str], on_host: bool) -> None:
        op = self.problem.ops[index]
        duration = op.duration_us
        if on_host:
            duration = op.host_duration_us or 0.0
        elif direct:
            duration += sum(op.direct[t] - op.duration_us for t in direct)
        position = len(self.runs)
        self.runs.append(RunOf(name, op, max(0.0, duration), on_host))
        accesses, plain = self.accesses, not (on_host or direct)
        self._plain_bytes.append(self.problem.operand_bytes[index] if plain else None)
        for t, reads, writes in self.problem.uses[index]:
            tier = DEVICE if plain or not (on_host or t in direct) else HOST
            accesses[t].append(_access(Access, (position, name, tier, reads, writes)))

    @cached_property
    def position(self) -> dict[str, int]:
        return {r.name: i for i, r in enumerate(self.runs)}

    @cached_property
    def op_bytes(self) -> list[int]:
        """Device bytes that each run needs by itself: operands, outputs and workspace."""
        need = []
        for known, run in zip(self._plain_bytes, self.runs, strict=True):
            if known is None:
                known = self._bytes_of(run)
            need.append(known)
        return need

    def _bytes_of(self, run: RunOf) -> int:
        tensor, position = self.problem.tensor, self.position[run.name]
        return (0 if run.on_host else run.op.workspace_bytes) + sum(
            tensor[t].nbytes
            for t in run.op.operands
            for a in self.accesses[t]
            if a.position == position and a.tier == DEVICE
        )

    def starts_us(self) -> list[float]:
        """Returns each run's start if nothing ever waited, and the end as the last entry."""
        starts, now = [], 0.0
        for r in self.runs:
            starts.append(now)
            if not r.on_host:
                now += r.duration_us
        return [*starts, now]


#: the decisions that change the runs of a step
Choices = tuple[tuple[Direct, ...], tuple[Recompute, ...], tuple[Update, ...]]
#: programs cached per problem
MOST_PROGRAMS = 8


def _lately(problem: Problem) -> dict[Choices, Program]:
    """The cache of recent programs of a problem, initially empty."""
    return {}


def span(first: int, last: int, length: int) -> Iterable[int]:
    """Returns positions strictly between `first` and `last` on a ring of `length`."""
    if last > first:
        return range(first + 1, last)
    return (*range(first + 1, length), *range(last))


class Intervals:
    """Sums over many open intervals (first, last) of a ring, in time linear in both."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.steps = [0] * (n + 1)

    def add(self, first: int, last: int, amount: int) -> None:
        steps, n = self.steps, self.n
        if last > first:
            steps[first + 1] += amount
            steps[last] -= amount
        else:
            steps[first + 1] += amount
            steps[n] -= amount
            steps[0] += amount
            steps[last] -= amount

    def sums(self) -> list[int]:
        return list(accumulate(self.steps[:-1]))


def too_small(position: int, need: int, capacity: int, program: Program, what: str) -> Infeasible:
    """Builds the error for a device that cannot hold the memory that one run needs."""
    run = program.runs[position]
    return Infeasible(
        f"{run.name} needs {need:,} bytes on the device ({what}) and the budget is"
        f" {capacity:,}: {need - capacity:,} are missing.",
        need - capacity,
        f"Raise the device budget to {need:,} bytes, or make {run.name} smaller"
        " (a smaller batch, or a narrower layer).",
    )
