"""Checks of a plan that need no run: names, ends, forms and order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from offcompile.ir.errors import Violation
from offcompile.ir.model import DEVICE, HOST, Machine, Problem
from offcompile.ir.plan import Plan
from offcompile.ir.units import show_bytes

from .forms import check_codecs
from .order import executed, host_ops, start_bytes
from .reach import check_order


def check_structure(problem: Problem, machine: Machine, plan: Plan) -> tuple[Violation, ...]:
    """Returns every fault of `plan` that no run could repair, each as a named violation.

    Rules that need valid names (order, codecs, space) are checked only if the names are valid.
    """
    found = [
        *_homes(problem, machine),
        *_doubles(problem, plan),
        *_names(problem, machine, plan),
        *_lanes(machine, plan),
        *_values(problem, plan),
        *_pinned(problem, plan),
        *_directs(problem, machine, plan),
        *_recomputes(problem, plan),
        *_updates(problem, machine, plan),
    ]
    if any(v.rule in ("duplicate-id", "unknown-id", "recompute", "update") for v in found):
        return tuple(found)
    codec = list(check_codecs(problem, machine, plan))
    found += codec
    found += check_order(executed(problem, plan), plan)
    if not codec:
        found += _space(problem, machine, plan)
    return tuple(found)


def _homes(problem: Problem, machine: Machine) -> Iterator[Violation]:
    for tensor in problem.tensors:
        if tensor.home is not None and tensor.home not in machine.tier:
            yield _unknown(f"tensor {tensor.id}", "tier", tensor.home, machine.tier, "as its home")
    for op in problem.ops:
        for name in op.operands:
            if name not in problem.tensor:
                yield _unknown(f"op {op.id}", "tensor", name, problem.tensor)


def _doubles(problem: Problem, plan: Plan) -> Iterator[Violation]:
    ops = {o.id for o in problem.ops}
    again = {r.id for r in plan.recomputes}
    for move_id, count in Counter(m.id for m in plan.moves).items():
        where = f"move {move_id}"
        if count > 1:
            yield Violation("duplicate-id", where, f"{count} moves have the id {move_id!r}")
        if move_id in ops:
            yield Violation("duplicate-id", where, f"an op has the id {move_id!r} too")
        if move_id in again:
            yield Violation("duplicate-id", where, f"{move_id!r} names a recomputation of the plan")
    for run_id in sorted(again & ops):
        yield Violation("duplicate-id", f"recompute {run_id}", f"an op has the id {run_id!r} too")
    lists: tuple[tuple[str, Iterable[Hashable]], ...] = (
        ("start", ((s.tensor, s.tier) for s in plan.start)),
        ("directs", ((d.op, d.tensor) for d in plan.directs)),
        ("recomputes", ((r.op, r.before) for r in plan.recomputes)),
        ("updates", (u.weight for u in plan.updates)),
    )
    for name, entries in lists:
        for entry, count in Counter(entries).items():
            if count > 1:
                yield Violation("duplicate-id", name, f"{entry!r} is listed {count} times")


def _names(problem: Problem, machine: Machine, plan: Plan) -> Iterator[Violation]:
    tensors, ops, tiers = problem.tensor, problem.op, machine.tier
    runs = {*ops, *(r.id for r in plan.recomputes)}
    things = {*runs, *(m.id for m in plan.moves)}
    asked: list[tuple[str, str, str | None, Iterable[str], str]] = []
    for s in plan.start:
        where = f"start of {s.tensor}"
        asked += [(where, "tensor", s.tensor, tensors, ""), (where, "tier", s.tier, tiers, "")]
    for m in plan.moves:
        where = f"move {m.id}"
        asked += [
            (where, "tensor", m.tensor, tensors, ""),
            (where, "tier", m.source, tiers, "as source"),
            (where, "tier", m.target, tiers, "as target"),
            (where, "lane", m.lane, machine.lane, ""),
            (where, "op, recomputation or move", m.start_after, things, "in start_after"),
            (where, "op or recomputation", m.ready_before, runs, "in ready_before"),
        ]
    for d in plan.drops:
        where = f"drop of {d.tensor} from {d.tier}"
        asked += [
            (where, "tensor", d.tensor, tensors, ""),
            (where, "tier", d.tier, tiers, ""),
            (where, "op, recomputation or move", d.after, things, "in after"),
        ]
    for x in plan.directs:
        where = f"direct {x.op}, {x.tensor}"
        asked += [(where, "op", x.op, ops, ""), (where, "tensor", x.tensor, tensors, "")]
    for r in plan.recomputes:
        where = f"recompute {r.id}"
        asked += [(where, "op", r.op, ops, ""), (where, "op", r.before, ops, "in before")]
    for u in plan.updates:
        asked.append((f"update of {u.weight}", "tensor", u.weight, tensors, ""))
    for where, what, name, known, role in asked:
        if name is not None and name not in known:
            yield _unknown(where, what, name, known, role)


def _unknown(where: str, what: str, name: str, known: Iterable[str], role: str = "") -> Violation:
    listed = sorted(known)
    shown = ", ".join(listed[:6]) + (f", … ({len(listed)} in all)" if len(listed) > 6 else "")
    detail = f"no {what} is named {name!r}{' (' + role + ')' if role else ''}"
    return Violation("unknown-id", where, f"{detail}; there are: {shown or 'none'}")


def _lanes(machine: Machine, plan: Plan) -> Iterator[Violation]:
    for move in plan.moves:
        lane = machine.lane.get(move.lane)
        if lane is not None and (lane.source, lane.target) != (move.source, move.target):
            detail = (
                f"goes {move.source} → {move.target}, but lane {lane.name} runs "
                f"{lane.source} → {lane.target}"
            )
            yield Violation("wrong-lane", f"move {move.id}", detail)


def _values(problem: Problem, plan: Plan) -> Iterator[Violation]:
    for update in plan.updates:
        if update.where not in (HOST, DEVICE):
            detail = f"where is {update.where!r}; it may be {HOST!r} or {DEVICE!r}"
            yield Violation("bad-value", f"update of {update.weight}", detail)
    if problem.steady:
        return
    for move in plan.moves:
        if move.wraps:
            detail = "wraps into the next step, but the problem is not steady: there is none"
            yield Violation("bad-value", f"move {move.id}", detail)
    given = {(s.tensor, s.tier) for s in plan.start}
    homes = {(t.id, t.home) for t in problem.tensors if t.home is not None}
    for tensor, tier in sorted(homes - given):
        detail = f"no copy on its home {tier}; the problem is not steady, so it starts from there"
        yield Violation("bad-value", f"start of {tensor}", detail)
    for tensor, tier in sorted(given - homes):
        if tensor in problem.tensor:
            home = problem.tensor[tensor].home
            detail = f"a copy on {tier}, but the problem is not steady and its home is {home}"
            yield Violation("bad-value", f"start of {tensor}", detail)


def _pinned(problem: Problem, plan: Plan) -> Iterator[Violation]:
    pinned = {t.id: t.home for t in problem.tensors if t.pinned}
    if not pinned:
        return
    asked = [
        *((m.tensor, f"move {m.id}", "moved") for m in plan.moves),
        *((d.tensor, f"drop of {d.tensor} from {d.tier}", "dropped") for d in plan.drops),
        *((d.tensor, f"direct {d.op}, {d.tensor}", "accessed in place") for d in plan.directs),
    ]
    for tensor, where, what in asked:
        if tensor in pinned:
            yield Violation("bad-value", where, f"{tensor} is pinned: it cannot be {what}")
    for start in plan.start:
        home = pinned.get(start.tensor)
        # `_values` reports the same for every tensor of a problem that is not steady
        if problem.steady and home is not None and start.tier != home:
            detail = f"a copy on {start.tier}, but {start.tensor} is pinned to its home {home}"
            yield Violation("bad-value", f"start of {start.tensor}", detail)


def _directs(problem: Problem, machine: Machine, plan: Plan) -> Iterator[Violation]:
    on_host = host_ops(problem, plan)
    for entry in plan.directs:
        op = problem.op.get(entry.op)
        if op is None or entry.tensor not in problem.tensor:
            continue
        where = f"direct {entry.op}, {entry.tensor}"
        if entry.tensor not in op.operands:
            yield Violation("direct", where, f"{op.id} neither reads nor writes {entry.tensor}")
        elif entry.tensor not in op.direct:
            detail = f"{op.id} has no `direct` duration for {entry.tensor}: it cannot be in place"
            yield Violation("direct", where, detail)
        if op.id in on_host:
            detail = f"{op.id} is updated on the host, where every operand is in place already"
            yield Violation("direct", where, detail)
        if HOST not in machine.tier:
            yield Violation("direct", where, f"the machine has no tier named {HOST!r}")


def _recomputes(problem: Problem, plan: Plan) -> Iterator[Violation]:
    on_host = host_ops(problem, plan)
    for entry in plan.recomputes:
        op, before = problem.op.get(entry.op), problem.op.get(entry.before)
        if op is None or before is None:
            continue
        where = f"recompute {entry.id}"
        if not op.recompute:
            yield Violation("recompute", where, f"{op.id} is not marked `recompute: true`")
        if problem.op_index[before.id] <= problem.op_index[op.id]:
            yield Violation("recompute", where, f"{before.id} does not come after {op.id}")
        if op.id in on_host:
            yield Violation("recompute", where, f"{op.id} is updated on the host")


def _updates(problem: Problem, machine: Machine, plan: Plan) -> Iterator[Violation]:
    wanted: dict[str, set[str]] = {}
    for entry in plan.updates:
        tensor = problem.tensor.get(entry.weight)
        if tensor is None:
            continue
        where = f"update of {entry.weight}"
        ops = [o for o in problem.ops if o.phase == "update" and entry.weight in o.writes]
        if tensor.kind != "weight":
            yield Violation("update", where, f"{tensor.id} is a {tensor.kind}, not a weight")
        elif not ops:
            yield Violation("update", where, f"no op of phase update writes {tensor.id}")
        for op in ops:
            wanted.setdefault(op.id, set()).add(entry.where)
            if entry.where == HOST and op.host_duration_us is None:
                yield Violation("update", where, f"{op.id} has no host_duration_us")
        if entry.where == HOST and HOST not in machine.tier:
            yield Violation("update", where, f"the machine has no tier named {HOST!r}")
    for op_id, places in wanted.items():
        if {HOST, DEVICE} <= places:
            detail = "its weights are listed both for the host and for the device"
            yield Violation("update", f"op {op_id}", detail)


def _space(problem: Problem, machine: Machine, plan: Plan) -> Iterator[Violation]:
    for tier, nbytes in start_bytes(problem, plan).items():
        capacity = machine.tier[tier].capacity_bytes
        if capacity is not None and nbytes > capacity:
            detail = (
                f"the start copies take {show_bytes(nbytes)} of {show_bytes(capacity)}: "
                f"{show_bytes(nbytes - capacity)} too many"
            )
            yield Violation("no-space", f"start on {tier}", detail)
