"""The oracle's rules for plans that need not run, and its arithmetic of bytes and nanoseconds.

Written from the words of the contract alone, as `oracle` is.
"""

from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction
from typing import Any

WHOLE = 1_000_000  # shares and speeds are in millionths


def ns(us: float | Fraction) -> int:
    """Whole nanoseconds, halves up, of the decimal that was written."""
    written = us if isinstance(us, Fraction) else Fraction(str(us))
    return math.floor(written * 1000 + Fraction(1, 2))


def copy_bytes(tensor: Any, codec: str | None) -> int:
    return (
        tensor.nbytes
        if codec is None
        else math.ceil(tensor.nbytes * Fraction(str(tensor.ratios[codec])))
    )


def move_ns(problem: Any, machine: Any, move: Any) -> int:
    lane, tensor = machine.lane[move.lane], problem.tensor[move.tensor]
    work = copy_bytes(tensor, move.codec) / Fraction(str(lane.bytes_per_us))
    if move.codec is not None:
        work = max(work, tensor.nbytes / Fraction(str(machine.codec[move.codec].bytes_per_us)))
    return ns(Fraction(str(lane.latency_us)) + work)


def static_rules(problem: Any, machine: Any, plan: Any) -> set[str]:
    """The rules that the plan breaks, as far as that shows without running it."""
    rules = set()
    tensors, ops = {t.id for t in problem.tensors}, {o.id: o for o in problem.ops}
    order = [o.id for o in problem.ops]
    again = [f"{r.op}@{r.before}" for r in plan.recomputes]
    named = Counter(order + again + [m.id for m in plan.moves])
    if max(named.values(), default=0) > 1 or len(set(plan.start)) < len(plan.start):
        rules.add("duplicate-id")
    for r in plan.recomputes:
        if r.op not in ops or r.before not in ops:
            rules.add("unknown-id")
        elif not ops[r.op].recompute or order.index(r.op) >= order.index(r.before):
            rules.add("recompute")
    for m in plan.moves:
        places = (m.start_after, m.ready_before)
        runs = set(order + again)
        if m.tensor not in tensors or m.lane not in machine.lane:
            rules.add("unknown-id")
            continue
        lane = machine.lane[m.lane]
        if (lane.source, lane.target) != (m.source, m.target):
            rules.add("wrong-lane")
        if places[0] not in {None, *named} or places[1] not in {None, *runs}:
            rules.add("unknown-id")
        ratios = problem.tensor[m.tensor].ratios
        if m.codec and not (m.codec in machine.codec and m.codec in ratios):
            rules.add("codec")
        if m.wraps and not problem.steady:
            rules.add("bad-value")
    for d in plan.drops:
        if d.tensor not in tensors or d.tier not in machine.tier or d.after not in {None, *named}:
            rules.add("unknown-id")
    for a in plan.directs:
        if a.op not in ops or a.tensor not in tensors:
            rules.add("unknown-id")
        elif a.tensor not in ops[a.op].direct or a.tensor not in ops[a.op].reads + ops[a.op].writes:
            rules.add("direct")
    for u in plan.updates:
        hosted = [o for o in problem.ops if o.phase == "update" and u.weight in o.writes]
        if u.weight not in tensors:
            rules.add("unknown-id")
            continue
        if problem.tensor[u.weight].kind != "weight":
            rules.add("update")
        if u.where == "host" and (not hosted or any(o.host_duration_us is None for o in hosted)):
            rules.add("update")
    for s in plan.start:
        if s.tensor not in tensors or s.tier not in machine.tier:
            rules.add("unknown-id")
    if not problem.steady:
        homes = {(t.id, t.home) for t in problem.tensors if t.home is not None}
        if {(s.tensor, s.tier) for s in plan.start} != homes:
            rules.add("bad-value")
    return rules
