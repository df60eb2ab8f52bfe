"""Turns the step of a model into the step of one rank: what it holds, and what it updates.

    ddp      as without ranks; updates wait until backward is over
    fsdp     a share of each weight, gradient and state, all of it on the device
    zero1    all weights and gradients on the device, and the states of some of the weights

That is what torch does today: DistributedDataParallel, fully_shard, ZeroRedundancyOptimizer. The
collectives are not in the problem, since plans decide nothing about them (`collectives`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

from offcompile.ahead.simple_reruns import block_named
from offcompile.graph.annotate import Annotated
from offcompile.graph.updates import HOME, Updates
from offcompile.ir import DEVICE, UPDATE, Problem, Tensor
from offcompile.optim.ranks.partition import partition

from .request import RankRequest

#: shares are rounded up to this; FSDP2 cuts tensors between rows
ROW_BYTES = 16
#: weights outside of all numbered modules
ROOT = ""


def on_rank(whole: Annotated, ranks: RankRequest, updates: Updates | None) -> Annotated:
    """Return the step of the rank that has most to do. `whole`: the step without updates."""
    found = _shared_out(whole, ranks.ranks) if ranks.shard == "fsdp" else whole
    if ranks.shard != "ddp":
        found = _on_device(found)
    if updates is not None:
        found = updates.added(found)
    if ranks.shard == "zero1":
        found = _updating(found, largest_share(found, ranks.ranks))
    if ranks.shard != "ddp":
        found = _on_device(found)
    ops = found.problem.ops
    late = (*(o for o in ops if o.phase != UPDATE), *(o for o in ops if o.phase == UPDATE))
    return replace(found, problem=replace(found.problem, ops=late))


def share_of(nbytes: int, ranks: int) -> int:
    """Bytes of the largest share, in whole rows of `ROW_BYTES`."""
    return -(-nbytes // (ranks * ROW_BYTES)) * ROW_BYTES


def groups_of(names: Mapping[str, str], weights: Iterable[str]) -> dict[str, list[str]]:
    """Group weights as FSDP2 does if each numbered module is sharded by itself, and then the model:
    weights outside of those are the root's."""
    found: dict[str, list[str]] = {}
    for weight in weights:
        found.setdefault(block_named(names.get(weight, ""), 1) or ROOT, []).append(weight)
    return found


def largest_share(annotated: Annotated, ranks: int) -> frozenset[str]:
    """The weights of the rank with most, by torch's rule, which is that of our optimizers."""
    states = {t.id for t in annotated.problem.tensors if t.kind == "state"}
    updated = [t for t in annotated.problem.tensors if f"{t.id}.states" in states]
    owners = partition([t.nbytes for t in updated], [0] * ranks)
    shares = Counter(dict.fromkeys(range(ranks), 0))
    for weight, owner in zip(updated, owners, strict=True):
        shares[owner] += weight.nbytes
    most = max(range(ranks), key=lambda rank: shares[rank])
    return frozenset(w.id for w, owner in zip(updated, owners, strict=True) if owner == most)


def trained_bytes(problem: Problem) -> int:
    """Bytes of all gradients."""
    return sum(t.nbytes for t in problem.tensors if t.kind == "gradient")


# --- parts of `on_rank` -------------------------------------------------------------------------


def _shared_out(whole: Annotated, ranks: int) -> Annotated:
    def share(tensor: Tensor) -> Tensor:
        if tensor.kind not in ("weight", "gradient"):
            return tensor
        return replace(tensor, nbytes=share_of(tensor.nbytes, ranks))

    problem = whole.problem
    return replace(whole, problem=replace(problem, tensors=tuple(map(share, problem.tensors))))


def _on_device(annotated: Annotated) -> Annotated:
    """Keep weights, gradients and states on the device."""
    problem = annotated.problem
    kept = {t.id for t in problem.tensors if t.kind in ("weight", "gradient", "state")} - {HOME.id}
    tensors = tuple(
        replace(t, home=None if t.home is None else DEVICE, pinned=True) if t.id in kept else t
        for t in problem.tensors
        if t.id != HOME.id
    )
    ops = tuple(
        replace(
            op,
            direct={t: us for t, us in op.direct.items() if t not in kept},
            host_duration_us=None,
        )
        for op in problem.ops
        if HOME.id not in op.writes
    )
    return replace(annotated, problem=replace(problem, tensors=tensors, ops=ops))


def _updating(annotated: Annotated, weights: frozenset[str]) -> Annotated:
    """Leave out the updates and states of all other weights."""
    problem = annotated.problem
    ops = tuple(op for op in problem.ops if op.phase != UPDATE or not weights.isdisjoint(op.writes))
    used = {t for op in ops for t in op.operands}
    tensors = tuple(t for t in problem.tensors if t.kind != "state" or t.id in used)
    return replace(annotated, problem=replace(problem, tensors=tensors, ops=ops))
