"""Moves gradients written on the host back to the device if there is room for them.

Writing in place saves device memory for the rest of the step. Where it costs no compute, a search
that looks at time alone chooses it for all gradients, which then go on to the disk behind the host,
or cross the link. So as many gradients as cost no time are produced on the device after all: the
last ones of the step, which stay there for the shortest time.
"""

from __future__ import annotations

from dataclasses import replace

from offcompile.ir import Machine, Plan, Problem
from offcompile.passes.build.contract import Judge


def brought_home(problem: Problem, machine: Machine, plan: Plan, judge: Judge) -> Plan:
    """Returns the plan with as many of its last gradients on the device as make it no slower.

    In a steady problem a gradient would have to leave before the step ends: nothing is changed.
    """
    written = _written_in_place(problem, plan)
    if problem.steady or not written:
        return plan
    limit_us = judge(problem, machine, plan).cost_us

    def with_last(count: int) -> Plan:
        here = set(written[len(written) - count :])
        return replace(plan, directs=tuple(d for d in plan.directs if (d.op, d.tensor) not in here))

    least, most = 0, len(written)
    while least < most:
        middle = (least + most + 1) // 2
        timeline = judge(problem, machine, with_last(middle))
        if timeline.valid and timeline.cost_us <= limit_us:
            least = middle
        else:
            most = middle - 1
    return with_last(least) if least else plan


def _written_in_place(problem: Problem, plan: Plan) -> list[tuple[str, str]]:
    """Returns (op, gradient) in op order: gradients written once, never read and never moved."""
    moved = {m.tensor for m in plan.moves} | {d.tensor for d in plan.drops}
    writers: dict[str, int] = {}
    for op in problem.ops:
        for t in op.writes:
            writers[t] = writers.get(t, 0) + 1
    read = {t for op in problem.ops for t in op.reads}
    found = [
        (d.op, d.tensor)
        for d in plan.directs
        if problem.tensor[d.tensor].kind == "gradient"
        and problem.tensor[d.tensor].home is None
        and writers.get(d.tensor) == 1
        and d.tensor not in moved
        and d.tensor not in read
    ]
    return sorted(found, key=lambda pair: problem.op_index[pair[0]])
