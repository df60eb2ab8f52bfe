"""A variant of a program: the choices that change its runs, and the gaps that result.

Direct accesses, recomputations and host updates change the runs of a step and the device memory
they need. The gaps for evictions are then chosen within the variant (`cover`, `search`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from offcompile.ir import (
    DEVICE,
    HOST,
    SELF_ENDING_KINDS,
    Direct,
    Infeasible,
    Machine,
    Op,
    Problem,
    Recompute,
    Update,
)
from offcompile.ir.units import show_bytes
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.passes.build.gaps import Gaps, find_gaps
from offcompile.passes.build.program import Program, too_small
from offcompile.passes.build.schedule import Builder
from offcompile.passes.select.gap_set import GapSet


@dataclass(frozen=True)
class Choices:
    """The departures from plain execution, as sets that are easy to change."""

    directs: frozenset[tuple[str, str]] = frozenset()
    recomputes: frozenset[tuple[str, str]] = frozenset()
    hosted: frozenset[str] = frozenset()  # weights updated on the host

    def decisions(self, problem: Problem, away: tuple[Away, ...] = ()) -> Decisions:
        at, op = problem.op_index, problem.op
        # a host update has all its operands in place: it has no direct accesses, and no device run
        # to repeat
        hosted = {o.id for o in problem.ops if o.phase == "update"} if self.hosted else set()
        hosted = {o for o in hosted if not self.hosted.isdisjoint(op[o].writes)}
        directs = sorted(self.directs, key=lambda d: (at[d[0]], d[1]))
        recomputes = sorted(self.recomputes, key=lambda r: (at[r[1]], at[r[0]]))
        return Decisions(
            away=away,
            directs=tuple(Direct(*d) for d in directs if d[0] not in hosted),
            recomputes=tuple(Recompute(*r) for r in recomputes if r[0] not in hosted),
            updates=tuple(Update(w, HOST) for w in sorted(self.hosted)),
        )


@dataclass
class ProgramVariant:
    """Choices, with the program and the gaps that they give on one machine."""

    problem: Problem
    machine: Machine
    choices: Choices
    tier: str = HOST
    lossy: bool = False
    capacity: float = field(init=False)

    def __post_init__(self) -> None:
        capacity = self.machine.tier[DEVICE].capacity_bytes
        self.capacity = float("inf") if capacity is None else capacity

    @cached_property
    def program(self) -> Program:
        return Program.of(self.problem, self.choices.decisions(self.problem))

    @cached_property
    def gaps(self) -> Gaps:
        return find_gaps(self.program, self.machine, self.tier, self.lossy)

    @cached_property
    def index_of(self) -> dict[tuple[str, str | None], int]:
        return {(g.tensor.id, g.after): g.index for g in self.gaps.gaps}

    def cover(self, away: set[tuple[str, str | None]]) -> GapSet:
        return GapSet(self.gaps, (self.index_of[k] for k in away if k in self.index_of))

    def with_choices(self, choices: Choices, cover: GapSet) -> tuple[ProgramVariant, GapSet]:
        """Returns a variant with other choices, and the same evictions where it has those gaps."""
        made = ProgramVariant(self.problem, self.machine, choices, self.tier, self.lossy)
        gaps = self.gaps.gaps
        return made, made.cover({(gaps[i].tensor.id, gaps[i].after) for i in cover.away})

    def decisions(self, cover: GapSet) -> Decisions:
        gaps = self.gaps.gaps
        return self.choices.decisions(self.problem, tuple(gaps[i].away for i in sorted(cover.away)))

    @cached_property
    def floor(self) -> list[int]:
        """Device bytes per run with an eviction in every gap."""
        away = tuple(gap.away for gap in self.gaps.gaps)
        decisions = self.choices.decisions(self.problem, away)
        return Builder(self.problem, self.machine, decisions, check=False).kept_bytes

    def check_floor(self) -> None:
        """Raises if some run does not fit even with an eviction in every gap."""
        floor = self.floor
        j = max(range(len(floor)), key=floor.__getitem__, default=0)
        if floor and floor[j] > self.capacity:
            what = f"{self.program.op_bytes[j]:,} of its own and what has no way out and back"
            raise too_small(j, floor[j], int(self.capacity), self.program, what)

    def held_in_words(self, position: int) -> str:
        """Describes the bytes that make up the floor at one run, largest first."""
        op, problem = self.program.runs[position].op, self.problem
        own = [problem.tensor[t] for t in op.operands]
        fixed: dict[str, int] = {}
        for tensor in problem.tensors:
            if tensor.id in op.operands:
                continue
            begun = tensor.home == DEVICE or (
                tensor.home is None
                and any(a.position <= position for a in self.program.accesses[tensor.id])
            )
            if begun and tensor.pinned and tensor.kind in ("weight", "gradient", "input", "output"):
                fixed[tensor.kind] = fixed.get(tensor.kind, 0) + tensor.nbytes
        found = [(n, f"{show_bytes(n)} of {kind}s") for kind, n in fixed.items() if n]
        found += [(t.nbytes, f"{t.id} ({show_bytes(t.nbytes)})") for t in own if t.nbytes]
        if op.workspace_bytes:
            found.append((op.workspace_bytes, f"workspace ({show_bytes(op.workspace_bytes)})"))
        found.sort(key=lambda f: -f[0])
        return ", ".join(text for _, text in found[:8]) + (", …" if len(found) > 8 else "")


def hostable(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Returns weights whose update ops may all run on the host, with those ops."""
    updates: dict[str, list[Op]] = {}
    for op in problem.ops:
        if op.phase == "update":
            for t in op.writes:
                if problem.tensor[t].kind == "weight":
                    updates.setdefault(t, []).append(op)
    return {
        weight: tuple(op.id for op in ops)
        for weight, ops in updates.items()
        if all(may_run_on_host(problem, op) for op in ops)
    }


def may_run_on_host(problem: Problem, op: Op) -> bool:
    """True if an update may run on the host: its time is known and no operand pinned elsewhere."""
    return op.host_duration_us is not None and not any(
        t.pinned and t.home != HOST for t in map(problem.tensor.__getitem__, op.operands)
    )


def held_on_host(problem: Problem) -> frozenset[str]:
    """Returns weights that only the host can update: an operand of the update is pinned there."""
    pinned = {t.id for t in problem.tensors if t.pinned and t.home == HOST}
    if not pinned:
        return frozenset()
    op = problem.op
    return frozenset(
        weight
        for weight, updates in hostable(problem).items()
        if any(not pinned.isdisjoint(op[u].operands) for u in updates)
    )


def forced_choices(problem: Problem, machine: Machine) -> Choices:
    """Returns the fewest direct accesses and host updates without which some op can never run."""
    capacity = machine.tier[DEVICE].capacity_bytes
    hosted = set(held_on_host(problem))
    if capacity is None:
        return Choices(hosted=frozenset(hosted))
    directs: set[tuple[str, str]] = set()
    may_host = hostable(problem) if HOST in machine.tier else {}
    for op in problem.ops:
        over = _bytes_of(problem, op) - capacity
        if over <= 0:
            continue
        weight = next((t for t in op.writes if t in may_host and op.phase == "update"), None)
        if weight is not None:
            hosted.add(weight)
            continue
        operands = [t for t in may_access(problem, op) if HOST in machine.tier]
        for t in _cheapest_cover(problem, op, operands, over):
            directs.add((op.id, t))
    return Choices(frozenset(directs), frozenset(), frozenset(hosted))


def may_access(problem: Problem, op: Op) -> list[str]:
    """Returns the operands that the op may access in place."""
    return [t for t in op.direct if t in op.operands and not problem.tensor[t].pinned]


def direct_choices(problem: Problem, machine: Machine, only_free: bool = False) -> Choices:
    """Returns the choices in which every access is in place that can be.

    `only_free`: only accesses that cost no extra time, or less than a move would take from compute.
    """
    if HOST not in machine.tier:
        return Choices()
    directs = frozenset(
        (op.id, t)
        for op in problem.ops
        for t in may_access(problem, op)
        if not only_free or op.direct[t] <= op.duration_us + _toll_us(problem, machine, op, t)
    )
    return Choices(directs, hosted=held_on_host(problem))


def _toll_us(problem: Problem, machine: Machine, op: Op, tensor: str) -> float:
    """Returns the compute time lost to the move that this operand would need otherwise."""
    reads = tensor in op.reads
    lanes = machine.lanes_between(*((HOST, DEVICE) if reads else (DEVICE, HOST)))
    nbytes = problem.tensor[tensor].nbytes
    return min(
        (lane.toll_us + lane.toll_share * nbytes / lane.bytes_per_us for lane in lanes),
        default=0.0,
    )


#: beyond this many reruns, recomputing everything is not an option
MOST_RECOMPUTED = 4000


def recompute_everything(problem: Problem) -> frozenset[tuple[str, str]]:
    """Returns reruns, right before each op, of the ops that produce its inputs, unless these were
    just used.

    Values whose inputs are gone as well are recomputed from further back, as often as needed: this
    is the least memory that recomputation can need, at up to the square of the compute.
    """
    writer: dict[str, int] = {}
    touched: dict[str, int] = {}
    found: set[tuple[str, str]] = set()

    def source_of(t: str) -> Op | None:
        made = problem.ops[writer[t]] if t in writer else None
        if made is None or not made.recompute or problem.tensor[t].kind not in SELF_ENDING_KINDS:
            return None
        return made

    for b, op in enumerate(problem.ops):
        gone = [t for t in op.reads if source_of(t) and touched[t] < b - 1]
        # once a chain is rerun, its other outputs need not have been kept either
        wanted = [
            t for t in op.reads if (made := source_of(t)) and gone and made.phase != op.phase
        ] + gone
        while wanted and len(found) <= MOST_RECOMPUTED:
            t = wanted.pop()
            made = source_of(t)
            if made is None or (made.id, op.id) in found:
                continue
            found.add((made.id, op.id))
            # intermediate values are freed again afterwards: they are not marked as touched
            wanted += [u for u in made.reads if touched.get(u, b) < b - 1 or u in op.reads]
        for t in op.operands:
            touched[t] = b
        writer.update(dict.fromkeys(op.writes, b))
    return frozenset(found) if len(found) <= MOST_RECOMPUTED else frozenset()


def _bytes_of(problem: Problem, op: Op) -> int:
    return op.workspace_bytes + sum(problem.tensor[t].nbytes for t in op.operands)


def _cheapest_cover(problem: Problem, op: Op, operands: list[str], over: int) -> list[str]:
    """Returns direct operands that free `over` bytes, best bytes per time first, without spares."""

    def added(t: str) -> float:
        return max(op.direct[t] - op.duration_us, 1e-9)

    size = {t: problem.tensor[t].nbytes for t in operands}
    chosen: list[str] = []
    for t in sorted(operands, key=lambda t: (-min(size[t], over) / added(t), t)):
        if over <= 0:
            break
        chosen.append(t)
        over -= size[t]
    for t in sorted(chosen, key=lambda t: (-added(t), t)):
        if over + size[t] <= 0:
            chosen.remove(t)
            over += size[t]
    return chosen


def infeasible_host(reason: str) -> Infeasible:
    return Infeasible(
        reason,
        None,
        "Raise the capacity of the host tier, or give the machine a disk tier.",
    )
