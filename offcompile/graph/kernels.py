"""Merges ops that Inductor fuses into one op of the Problem.

Inductor fuses all it can between two library calls, and a movement node in the middle would break a
kernel in two. So a run of fusible ops between library calls is planned as one op: no move starts or
is awaited inside it, tensors used only within it become its workspace, and it is recomputed as a
whole.

Inductor computes a value that it never writes in the kernel that reads it, even if the graph has a
library call between the two. So such ops are put right before their first reader. If a kernel is in
two parts all the same, neither part is recomputed without the other: forward would have to write
that value, and keep it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import fx

from offcompile.ir import Op, Problem

from .annotate import Annotated
from .graphs import Graphs
from .storages import Place

#: longer runs are split, so that tensors can still move in long sequences of fusible ops
MOST_OPS = 32


def merge_kernels(
    annotated: Annotated, graphs: Graphs, fuses: Callable[[fx.Node], bool]
) -> Annotated:
    """The same step, with runs of ops for which `fuses` is true merged."""
    nodes = {(p, n.name): n for p, m in graphs for n in m.graph.nodes}

    def fusible(op: Op) -> bool:
        return all(fuses(nodes[place]) for place in annotated.node_of[op.id])

    groups: list[list[Op]] = []
    for op in _late(annotated.problem, fusible):
        last = groups[-1] if groups else []
        joins = last and len(last) < MOST_OPS and last[-1].phase == op.phase
        if joins and fusible(op) and fusible(last[-1]):
            last.append(op)
        else:
            groups.append([op])
    return _merged(annotated, groups)


def _late(problem: Problem, fusible: Callable[[Op], bool]) -> list[Op]:
    """The ops, each one whose values are never written right before the first that reads them."""
    ops = problem.ops
    #: the place of each op in the new order: its own, or that of the op that it comes before
    place = list(range(len(ops)))
    #: tensor → the first place at which it is read
    readers: dict[str, int] = {}
    for i in reversed(range(len(ops))):
        op = ops[i]
        after = [readers[t] for t in op.writes if t in readers]
        if after and fusible(op) and all(_unwritten(problem, t) for t in op.writes):
            to = min(after)
            changed = {t for other in ops[i + 1 : to] for t in other.writes}
            if ops[to].phase == op.phase and changed.isdisjoint(op.reads):
                place[i] = to
        for t in op.reads:
            readers[t] = min(place[i], readers.get(t, place[i]))
    return [ops[i] for i in sorted(range(len(ops)), key=lambda i: (place[i], i))]


def _unwritten(problem: Problem, tensor_id: str) -> bool:
    """True if Inductor is expected never to write the value to memory."""
    return not problem.tensor[tensor_id].nbytes and _ends_by_itself(problem, tensor_id)


def _merged(annotated: Annotated, groups: list[list[Op]]) -> Annotated:
    problem = annotated.problem
    users: dict[str, set[int]] = {}
    for i, group in enumerate(groups):
        for op in group:
            for t in op.operands:
                users.setdefault(t, set()).add(i)
    gone: set[str] = set()
    ops: list[Op] = []
    node_of: dict[str, tuple[Place, ...]] = {}
    for group in groups:
        written = {t for op in group for t in op.writes}
        inner = {t for t in written if len(users[t]) == 1 and _ends_by_itself(problem, t)}
        gone |= inner
        merged = group[0] if len(group) == 1 and not inner else _one_op(problem, group, inner)
        if any(_unwritten(problem, t) for t in merged.reads):
            merged = replace(merged, recompute=False)
        ops.append(merged)
        node_of[merged.id] = tuple(p for op in group for p in annotated.node_of[op.id])
    tensors = tuple(t for t in problem.tensors if t.id not in gone)
    merged_problem = Problem(tensors, tuple(ops), problem.steady)
    return replace(annotated, problem=merged_problem, node_of=node_of)


def _ends_by_itself(problem: Problem, tensor_id: str) -> bool:
    tensor = problem.tensor[tensor_id]
    return tensor.home is None and tensor.kind == "activation"


def _one_op(problem: Problem, group: list[Op], inner: set[str]) -> Op:
    last = {t: i for i, op in enumerate(group) for t in op.operands if t in inner}
    first: dict[str, int] = {}
    reads: dict[str, None] = {}
    writes: dict[str, None] = {}
    for i, op in enumerate(group):
        reads.update(dict.fromkeys(t for t in op.reads if t not in writes and t not in inner))
        writes.update(dict.fromkeys(t for t in op.writes if t not in inner))
        for t in op.operands:
            first.setdefault(t, i)
    workspace = 0
    for i, op in enumerate(group):
        live = sum(problem.tensor[t].nbytes for t in last if first[t] <= i <= last[t])
        workspace = max(workspace, live + op.workspace_bytes)
    return Op(
        id=group[0].id,
        phase=group[0].phase,
        duration_us=round(sum(op.duration_us for op in group), 3),
        reads=tuple(reads),
        writes=tuple(writes),
        workspace_bytes=workspace,
        direct=_in_place(group),
        recompute=all(op.recompute for op in group),
    )


def _in_place(group: list[Op]) -> dict[str, float]:
    """Operand → the group's duration if its users in the group access it in place; only operands
    that all their users may access in place."""
    total = sum(op.duration_us for op in group)
    found: dict[str, float] = {}
    for t in dict.fromkeys(t for op in group for t in op.direct):
        users = [op for op in group if t in op.operands]
        if all(t in op.direct for op in users):
            more = sum(op.direct[t] - op.duration_us for op in users)
            found[t] = round(total + more, 3)
    return found
