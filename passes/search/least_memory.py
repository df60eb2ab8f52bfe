"""The device memory that a step takes at least, whatever moves or runs again.

Finds in time linear in the problem that there is no plan, so that none is searched for.
"""

from __future__ import annotations

from offcompile.ir import DEVICE, HOST, Machine, Problem

from .program_variant import may_access, may_run_on_host


def least_bytes(problem: Problem, machine: Machine) -> int:
    """Returns bytes below which some op can never run: its operands that it cannot access in place
    on the host, its workspace, and the pinned tensors that are there besides."""
    with_host = HOST in machine.tier
    tensor, lasting = problem.tensor, problem.surviving_ids
    pinned = {t.id for t in problem.tensors if t.pinned and t.id in lasting}
    standing = {t for t in pinned if tensor[t].home == DEVICE}
    beside, most = sum(tensor[t].nbytes for t in standing), 0
    for op, own in zip(problem.ops, problem.operand_bytes, strict=True):
        if with_host and op.phase == "update" and may_run_on_host(problem, op):
            continue
        in_place = may_access(problem, op) if with_host else ()
        needed = own - sum(tensor[t].nbytes for t in in_place)
        counted = sum(tensor[t].nbytes for t in op.operands if t in standing)
        most = max(most, needed + beside - counted)
        if problem.steady:
            continue  # what a step makes is there from its beginning, or not until the next
        made = [t for t in op.writes if t in pinned - standing and tensor[t].home is None]
        standing.update(made)
        beside += sum(tensor[t].nbytes for t in made)
    return most
