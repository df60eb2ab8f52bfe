"""Problems and plans as integers, so that many plans of one problem can be run quickly.

A *copy* of tensor t on tier r has the key t * n_tiers + r everywhere in the simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from offcompile.ir import (
    DEVICE,
    HOST,
    SELF_ENDING_KINDS,
    Direct,
    Machine,
    Move,
    Op,
    Plan,
    Problem,
    Recompute,
    Update,
)
from offcompile.ir.units import compressed_bytes, move_ns, round_ns

from .links import LinkFigures, shares_of_run

UNLIMITED = 1 << 200


@dataclass(frozen=True, slots=True)
class Indices:
    """Name → number, by which the simulator knows it. Codecs count from 1: 0 is none."""

    tensor: Mapping[str, int]
    tier: Mapping[str, int]
    lane: Mapping[str, int]
    codec: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CompiledOp:
    """The figures of an op that no plan changes. Tensors are numbers, each listed once."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    #: the tensors that it touches, each with True if it is only written
    touches: tuple[tuple[int, bool], ...]
    duration_ns: int
    #: tensor → duration with it used in place on the host
    direct_ns: Mapping[int, int]
    host_ns: int | None
    workspace: int


class CompiledProblem:
    """The parts of a problem on a machine that no plan changes."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self.problem = problem
        self.machine = machine
        self.n_tiers = len(machine.tiers)
        self.number = Indices(
            tensor={t.id: i for i, t in enumerate(problem.tensors)},
            tier={t.name: i for i, t in enumerate(machine.tiers)},
            lane={lane.name: i for i, lane in enumerate(machine.lanes)},
            codec={name: i + 1 for i, name in enumerate(machine.codec)},
        )
        self.device = self.number.tier[DEVICE]
        self.host = self.number.tier.get(HOST, -1)
        self.capacity = [
            UNLIMITED if t.capacity_bytes is None else t.capacity_bytes for t in machine.tiers
        ]
        self.links = [LinkFigures.of(link, machine.lanes) for link in machine.shared]
        self.nbytes = [t.nbytes for t in problem.tensors]
        self.self_ending = [t.kind in SELF_ENDING_KINDS for t in problem.tensors]
        self.must_survive = [problem.must_survive(t.id) for t in problem.tensors]
        self.ops = [_compiled_op(op, self.number.tensor) for op in problem.ops]
        #: figures of the moves seen so far
        self.transfers: dict[tuple[str, str, str, str, str | None], MoveFigures] = {}
        #: recently used orders of runs
        self.orders: dict[Choices, RunOrder] = {}
        #: (op, True if on the host) → its figures without in-place access
        self.runs: dict[tuple[int, bool], Figures] = {}

    @property
    def tier_names(self) -> list[str]:
        return [t.name for t in self.machine.tiers]

    def key(self, tensor: str, tier: str) -> int:
        return self.number.tensor[tensor] * self.n_tiers + self.number.tier[tier]


def _compiled_op(op: Op, number: Mapping[str, int]) -> CompiledOp:
    reads = tuple({number[t]: None for t in op.reads})
    writes = tuple({number[t]: None for t in op.writes})
    host_us = op.host_duration_us
    return CompiledOp(
        reads=reads,
        writes=writes,
        touches=tuple((t, t not in reads) for t in dict.fromkeys(reads + writes)),
        duration_ns=round_ns(op.duration_us),
        direct_ns={number[t]: round_ns(us) for t, us in op.direct.items()},
        host_ns=None if host_us is None else round_ns(host_us),
        workspace=op.workspace_bytes,
    )


@dataclass(slots=True)
class CompiledRun:
    """One run of an op in a step: an ordinary one, a recomputation, or a host update."""

    id: str
    index: int  # its position on its own compute lane
    number: int  # its number among the runs of both lanes
    on_host: bool
    duration_ns: int
    workspace: int
    reads: tuple[int, ...]  # copies that must be valid
    host_reads: frozenset[int]  # the subset accessed in place on the host
    writes: tuple[int, ...]  # copies that are written
    tensors: tuple[int, ...]
    written: tuple[int, ...]
    mortal: tuple[int, ...]  # the tensors that end by themselves
    outputs: tuple[tuple[int, bool, int], ...]  # copies written: key, True if on device, bytes
    #: millionths of each shared link that it takes; empty if it takes none
    link_shares: tuple[int, ...]
    #: number of runs of the other compute lane that must have ended in this step
    other_lane_runs: int = 0


@dataclass(slots=True)
class Transfer:
    """One move, in integers."""

    id: str
    index: int
    tensor: int
    source: int  # copy keys
    target: int
    target_tier: int
    from_device: bool
    to_device: bool
    codec: int  # 0: none
    duration_ns: int
    target_bytes: int
    lane: int
    wraps: bool
    #: ("start", 0) | ("run", index) | ("update", index) | ("move", index)
    trigger: tuple[str, int] = ("start", 0)
    drops: list[int] = field(default_factory=list)


#: constant for all runs of an op: the fields of `CompiledRun` from its duration on
Figures = tuple[
    int,
    int,
    tuple[int, ...],
    frozenset[int],
    tuple[int, ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[int, ...],
    tuple[tuple[int, bool, int], ...],
    tuple[int, ...],
]
#: constant for a move: the fields of `Transfer` from its tensor to its lane
MoveFigures = tuple[int, int, int, int, bool, bool, int, int, int, int]
#: the parts of a plan that determine its runs
Choices = tuple[tuple[Direct, ...], tuple[Recompute, ...], tuple[Update, ...]]
#: number of orders of runs kept per problem
MOST_ORDERS = 4


class RunOrder:
    """The runs of a step, as determined by directs, recomputations and host updates."""

    def __init__(self, base: CompiledProblem, plan: Plan) -> None:
        problem = base.problem
        on_host = _host_update_ops(problem, plan)
        directs: dict[str, set[int]] = {}
        for d in plan.directs:
            directs.setdefault(d.op, set()).add(base.number.tensor[d.tensor])
        again: dict[str, list[str]] = {}
        for r in plan.recomputes:
            again.setdefault(r.before, []).append(r.op)

        self.runs: list[CompiledRun] = []
        self.updates: list[CompiledRun] = []
        #: per tensor, in listed order: True for each access that only writes
        self.accesses: list[list[bool]] = [[] for _ in base.nbytes]
        self.where: dict[str, tuple[str, int]] = {}
        accesses, none = self.accesses, set[int]()
        last_run_touching: dict[int, int] = {}
        last_update_touching: dict[int, int] = {}

        def add(name: str, index: int, host_update: bool) -> None:
            mine, place, last_mine, last_other = (
                (self.updates, "update", last_update_touching, last_run_touching)
                if host_update
                else (self.runs, "run", last_run_touching, last_update_touching)
            )
            direct = directs.get(problem.ops[index].id, none) if directs else none
            number = len(self.where)
            run = _run(base, name, len(mine), number, index, direct, host_update)
            self.where[name] = (place, len(mine))
            mine.append(run)
            if on_host:
                run.other_lane_runs = max((last_other.get(t, 0) for t in run.tensors), default=0)
                last_mine.update(dict.fromkeys(run.tensors, len(mine)))
            for t, pure in base.ops[index].touches:
                accesses[t].append(pure)

        for index, op in enumerate(problem.ops):
            for name in again.get(op.id, ()):
                add(f"{name}@{op.id}", problem.op_index[name], False)
            add(op.id, index, op.id in on_host)

    @classmethod
    def of(cls, base: CompiledProblem, plan: Plan) -> RunOrder:
        choices = plan.directs, plan.recomputes, plan.updates
        found = base.orders.get(choices)
        if found is None:
            found = cls(base, plan)
            while len(base.orders) >= MOST_ORDERS:
                del base.orders[next(iter(base.orders))]
            base.orders[choices] = found
        return found


class CompiledPlan:
    """A plan that passes `verify.check_structure`, in integers."""

    def __init__(self, base: CompiledProblem, plan: Plan) -> None:
        self.base = base
        self.plan = plan
        order = RunOrder.of(base, plan)
        self.runs, self.updates, self.accesses = order.runs, order.updates, order.accesses
        where = order.where
        self.moves = [self._transfer(i, m) for i, m in enumerate(plan.moves)]
        #: by number of the run: moves that it waits for, and drops that follow it
        self.before_moves: dict[int, list[int]] = {}
        self.run_drops: dict[int, list[int]] = {}
        move_index = {m.id: i for i, m in enumerate(plan.moves)}
        for i, m in enumerate(plan.moves):
            if m.start_after is not None:
                self.moves[i].trigger = where.get(m.start_after) or (
                    "move",
                    move_index[m.start_after],
                )
            if m.ready_before is not None:
                self.before_moves.setdefault(self._number(where[m.ready_before]), []).append(i)
        self.lanes: list[list[int]] = [[] for _ in base.machine.lanes]
        for t in self.moves:
            self.lanes[t.lane].append(t.index)
        self.n_plain_moves = sum(not t.wraps for t in self.moves)
        self.wrapped = [t.index for t in self.moves if t.wraps]

        self.drops = [base.key(d.tensor, d.tier) for d in plan.drops]
        self.start_drops: list[int] = []
        for i, drop in enumerate(plan.drops):
            if drop.after is None:
                self.start_drops.append(i)
            elif drop.after in where:
                self.run_drops.setdefault(self._number(where[drop.after]), []).append(i)
            else:
                self.moves[move_index[drop.after]].drops.append(i)
        self.start = self._start_copies()

    def _number(self, place: tuple[str, int]) -> int:
        return (self.runs if place[0] == "run" else self.updates)[place[1]].number

    def _transfer(self, index: int, m: Move) -> Transfer:
        asked = m.tensor, m.source, m.target, m.lane, m.codec
        known = self.base.transfers.get(asked)
        if known is None:
            known = self.base.transfers[asked] = _move_figures(self.base, m)
        return Transfer(m.id, index, *known, wraps=m.wraps)

    def _start_copies(self) -> list[tuple[int, int, int]]:
        """(copy, bytes, codec) of the settled state; compressed moves leave compressed copies."""
        # only in a steady problem can moves of the previous step have left a compressed copy
        steady = self.base.problem.steady
        left_by = {t.target: t for t in self.moves if steady and not t.to_device}
        copies = []
        for s in self.plan.start:
            key = self.base.key(s.tensor, s.tier)
            last = left_by.get(key)
            if last is not None and last.codec:
                copies.append((key, last.target_bytes, last.codec))
            else:
                copies.append((key, self.base.nbytes[key // self.base.n_tiers], 0))
        return copies


def _host_update_ops(problem: Problem, plan: Plan) -> set[str]:
    weights = {u.weight for u in plan.updates if u.where == HOST}
    return {o.id for o in problem.ops if o.phase == "update" and not weights.isdisjoint(o.writes)}


def _move_figures(base: CompiledProblem, m: Move) -> MoveFigures:
    tensor, lane = base.problem.tensor[m.tensor], base.machine.lane[m.lane]
    if m.codec is None:
        size, rate = tensor.nbytes, None
    else:
        size = compressed_bytes(tensor.nbytes, tensor.ratios[m.codec])
        rate = base.machine.codec[m.codec].bytes_per_us
    to_device = m.target == DEVICE
    return (
        base.number.tensor[m.tensor],
        base.key(m.tensor, m.source),
        base.key(m.tensor, m.target),
        base.number.tier[m.target],
        m.source == DEVICE,
        to_device,
        0 if m.codec is None else base.number.codec[m.codec],
        move_ns(size, lane.bytes_per_us, lane.latency_us, tensor.nbytes, rate),
        tensor.nbytes if to_device else size,
        base.number.lane[m.lane],
    )


def _run(
    base: CompiledProblem,
    name: str,
    index: int,
    number: int,
    op: int,
    direct: set[int],
    on_host: bool,
) -> CompiledRun:
    known = base.runs.get((op, on_host)) if not direct else None
    if known is None:
        known = _figures(base, op, direct, on_host)
        if not direct:
            base.runs[op, on_host] = known
    return CompiledRun(name, index, number, on_host, *known)


def _figures(base: CompiledProblem, number: int, direct: set[int], on_host: bool) -> Figures:
    n, op = base.n_tiers, base.ops[number]
    if on_host:
        direct = {*op.reads, *op.writes}
        duration = op.host_ns or 0
    else:
        more = sum(op.direct_ns[t] - op.duration_ns for t in direct)
        duration = max(0, op.duration_ns + more)

    def keys(tensors: Sequence[int]) -> tuple[int, ...]:
        return tuple(t * n + (base.host if t in direct else base.device) for t in tensors)

    accesses = [
        link.accesses_ns(
            [t for t in op.reads if t in direct],
            [t for t in op.writes if t in direct],
            base.nbytes,
            on_host,
        )
        for link in base.links
    ]
    reads, writes = keys(op.reads), keys(op.writes)
    tensors = tuple(t for t, _ in op.touches)
    return (
        duration,
        op.workspace,
        reads,
        frozenset(k for k in reads if k % n == base.host),
        writes,
        tensors,
        op.writes,
        tuple(t for t in tensors if base.self_ending[t]),
        tuple((k, k % n == base.device, base.nbytes[k // n]) for k in writes),
        shares_of_run(duration, accesses),
    )
