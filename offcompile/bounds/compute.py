"""Bounds without memory: the time of the compute lane, and the memory of a single op."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from offcompile.ir import HOST, Machine, Problem
from offcompile.ir.units import round_ns


@dataclass(frozen=True)
class Floor:
    """The op that needs the most device memory under any plan, and its tensors."""

    op: str | None
    needed_bytes: int
    tensors: tuple[str, ...]


def compute_ns(problem: Problem, machine: Machine) -> int:
    """Every op runs once, at the best of its direct accesses; updates share two serial lanes.

    The split of the updates between the compute lane and `host_compute` is the fractional one
    that ends both soonest: it moves those that cost the host least per device time saved.
    """
    has_host = HOST in machine.tier
    fixed, movable = 0, []
    for op in problem.ops:
        base = round_ns(op.duration_us)
        deltas = [round_ns(us) - base for t, us in op.direct.items() if t in op.operands]
        least = max(0, base + sum(d for d in deltas if d < 0)) if has_host else base
        fixed += least
        if has_host and op.phase == "update" and op.host_duration_us is not None and least:
            movable.append((least, round_ns(op.host_duration_us)))
    device, host = Fraction(fixed), Fraction(0)
    for saves, costs in sorted(movable, key=lambda m: Fraction(m[1], m[0])):
        share = min(Fraction(1), (device - host) / (saves + costs))
        if share <= 0:
            break
        device -= share * saves
        host += share * costs
    return -(-device.numerator // device.denominator)  # whole nanoseconds: round up


def floor_bytes(problem: Problem, machine: Machine) -> Floor:
    """The most bytes that must be on the device during one op, under any plan.

    Operands and outputs that cannot be accessed in place, and workspace. Updates that may run on
    the host need nothing.
    """
    has_host = HOST in machine.tier
    worst = Floor(None, 0, ())
    for op in problem.ops:
        if has_host and op.phase == "update" and op.host_duration_us is not None:
            continue
        there = tuple(t for t in op.operands if not (has_host and t in op.direct))
        needed = op.workspace_bytes + sum(problem.tensor[t].nbytes for t in there)
        if needed > worst.needed_bytes or worst.op is None:
            worst = Floor(op.id, needed, there)
    return worst
