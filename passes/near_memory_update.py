"""Runs updates on the host, next to the optimizer states, while backward is still computing.

This is the software side of the AXDIMM platform (§5.2): each gradient is sent to the host as soon
as it is produced, which frees its device memory, and the host updates that weight next to its
states, overlapped with backward and with the transfers of other gradients. Updated weights return
when the next forward pass needs them. The AXDIMM's two channels (§3.2, §5.2) need no decision here:
they let transfers and updates run concurrently, as the host lane and the links do anyway.

The platform runs every update on the host. The last gradients of a step then have nothing left to
overlap with; `auto` leaves their updates on the device and searches for the balance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from offcompile.ir import DEVICE, HOST, Infeasible, Lane, Machine, Op, Plan, Problem
from offcompile.ir.units import round_ns

from .build.contract import Judge
from .build.lanes import Routes
from .search.fitting import Fitting, with_hosted
from .search.program_variant import Choices, may_run_on_host
from .select.update_share import HostRun, host_ends_ns

PLACES = ("auto", "host", "device")
#: how many splits the judge tries besides all and none on the host: fewer for longer steps, down to
#: one
ASKED = 4
OPS_ASKED = 2400


@dataclass(frozen=True)
class NearMemoryUpdate:
    """Chooses which updates run on the host: all that may, none, or some of them.

    `where` is `host` (all that may), `device` (none) or `auto`. `auto` splits them in the order in
    which their gradients become ready, the first ones on the host, at the point that best balances
    host lane, links and compute.
    """

    name: ClassVar[str] = "near_memory_update"

    where: str = "auto"
    judge: Judge | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if self.where not in PLACES:
            known = ", ".join(PLACES)
            raise ValueError(f"where is {self.where!r}; it must be one of {known}")

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        fitting = Fitting(problem, machine, self.judge, plan, first="state")
        updates = host_updates(problem) if fitting.host else ()
        balance = _Balance(problem, machine, updates)
        patience = max(1, min(ASKED, OPS_ASKED // max(1, len(problem.ops))))
        for asked, count in enumerate(self._splits(updates, balance, patience)):
            if fitting.trials.best is not None and (self.judge is None or asked > 2 * patience):
                break
            chosen = updates[:count]
            hosted = {w for u in chosen for w in u.weights}
            base = fitting.base
            if self.where == "device":  # undo host updates of an earlier plan
                base = Choices(base.directs, base.recomputes, fitting.forced.hosted)
            choices = with_hosted(problem, base, hosted)
            fitting.offer(fitting.variant(choices), ())
            born = _written_in_place(problem, balance, chosen, choices)
            if self.judge is not None and born and patience > 1:
                choices = Choices(choices.directs | born, choices.recomputes, choices.hosted)
                fitting.offer(fitting.variant(choices), ())
        return fitting.plan()

    def _splits(
        self, updates: tuple[HostUpdate, ...], balance: _Balance, patience: int
    ) -> list[int]:
        """Returns numbers of updates to run on the host, the most promising first."""
        everything = len(updates)
        if self.where != "auto":
            return [everything if self.where == "host" else 0]
        # among equal estimates, prefer more on the host: it frees more of the device
        ranked = sorted(range(everything + 1), key=lambda k: (balance.end_ns(k), -k))
        return list(dict.fromkeys([*ranked[:patience], everything, 0]))


@dataclass(frozen=True)
class HostUpdate:
    """Update ops that move to the host together, and the weights that identify them."""

    weights: tuple[str, ...]
    ops: tuple[Op, ...]
    #: index of the last op that writes one of their inputs: then their gradients are ready
    ready: int


def host_updates(problem: Problem) -> tuple[HostUpdate, ...]:
    """Returns every update that may run on the host, in the order in which gradients become ready.

    Naming a weight moves all update ops that write it, and the other weights of those ops with
    them.
    """
    group: dict[str, set[str]] = {}  # weight → the weights that move with it
    ops = [o for o in problem.ops if o.phase == "update"]
    for op in ops:
        weights = [t for t in op.writes if problem.tensor[t].kind == "weight"]
        together = set(weights).union(*(group.get(w, ()) for w in weights))
        for w in together:
            group[w] = together
    found: list[HostUpdate] = []
    for w, together in group.items():
        mine = tuple(o for o in ops if not together.isdisjoint(o.writes))
        if w != min(together) or not all(may_run_on_host(problem, o) for o in mine):
            continue
        ready = max(_ready(problem, o, mine) for o in mine)
        found.append(HostUpdate(tuple(sorted(together)), mine, ready))
    return tuple(sorted(found, key=lambda u: (u.ready, u.weights)))


def _ready(problem: Problem, update: Op, own: Iterable[Op]) -> int:
    """Index of the last op before `update` that writes one of its operands (−1: none)."""
    besides = {o.id for o in own}
    operands = set(update.operands)
    for i in range(problem.op_index[update.id] - 1, -1, -1):
        op = problem.ops[i]
        if op.id not in besides and not operands.isdisjoint(op.writes):
            return i
    return -1


class _Balance:
    """Estimates the step time when the first `k` updates run on the host."""

    def __init__(self, problem: Problem, machine: Machine, updates: tuple[HostUpdate, ...]) -> None:
        self.problem, self.updates = problem, updates
        self.routes = Routes(machine)
        self.out = self._lanes(DEVICE, HOST)
        self.back = self._lanes(HOST, DEVICE)
        hosted = {o.id for u in updates for o in u.ops}
        written: set[str] = set()
        for op in problem.ops:
            if op.id not in hosted:
                written.update(op.writes)
        self.written = frozenset(written)
        self.read = frozenset(t for o in problem.ops if o.id not in hosted for t in o.reads)

    def _lanes(self, source: str, target: str) -> list[Lane]:
        try:
            return self.routes.lanes(source, target)
        except Infeasible:
            return []

    def move_ns(self, tensor: str, lanes: list[Lane]) -> int:
        if not lanes:
            return 1 << 60
        t = self.problem.tensor[tensor]
        return round_ns(max(self.routes.move_us(t, lane, None) for lane in lanes))

    def end_ns(self, count: int) -> int:
        """Estimates when the step ends: the latest of compute, both links and the host lane."""
        on_host = {o.id for u in self.updates[:count] for o in u.ops}
        now, ends = 0, []
        for op in self.problem.ops:
            now += 0 if op.id in on_host else round_ns(op.duration_us)
            ends.append(now)
        runs = [self._run(u, ends[u.ready] if u.ready >= 0 else 0) for u in self.updates[:count]]
        return max(now, host_ends_ns(runs)[-1])

    def _run(self, update: HostUpdate, ready_ns: int) -> HostRun:
        operands = {t for o in update.ops for t in o.operands}
        changed = {t for o in update.ops for t in o.writes}
        return HostRun(
            ready_ns,
            out_ns=sum(self.move_ns(t, self.out) for t in operands & self.written),
            host_ns=sum(round_ns(o.host_duration_us or 0.0) for o in update.ops),
            back_ns=sum(self.move_ns(t, self.back) for t in changed & self.read),
        )


def _written_in_place(
    problem: Problem, balance: _Balance, chosen: Iterable[HostUpdate], choices: Choices
) -> frozenset[tuple[str, str]]:
    """Returns gradients of host updates that are cheaper to write on the host than to move."""
    wanted = {t for u in chosen for o in u.ops for t in o.reads}
    hosted = {o.id for u in chosen for o in u.ops}
    found: set[tuple[str, str]] = set()
    for g in sorted(wanted):
        writers = [o for o in problem.ops if g in o.writes and o.id not in hosted]
        tensor = problem.tensor[g]
        if tensor.kind != "gradient" or tensor.pinned or not writers:
            continue
        if all(g in o.direct for o in writers):
            extra = sum(round_ns(o.direct[g]) - round_ns(o.duration_us) for o in writers)
            if extra < balance.move_ns(g, balance.out):
                found |= {(o.id, g) for o in writers}
    on_host = {
        o.id for o in problem.ops if o.phase == "update" and not choices.hosted.isdisjoint(o.writes)
    }
    return frozenset(d for d in found if d[0] not in on_host) - choices.directs
