"""Rewrites planned graphs so that they carry out their plan, and readies the process for moves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import torch

from offcompile.graph.graphs import Graphs
from offcompile.graph.lowering.rewrite import Rewritten, rewrite
from offcompile.graph.update_advice import advice
from offcompile.ir import OffloadError, Plan, Problem
from offcompile.machine.target import CudaTarget
from offcompile.report.log import tell_once, warn
from offcompile.report.verified import Verified
from offcompile.run.accounts.apply_placement import WeightPlaces, weight_places
from offcompile.run.accounts.wall import Watch
from offcompile.run.problem_source import ProblemSource
from offcompile.runtime.device.cuda.growing import grow_segments
from offcompile.runtime.memory.malloc import tensor_memory
from offcompile.runtime.memory.malloc.advice import HINT, malloc_leaves_holes
from offcompile.runtime.memory.malloc.heap import heap
from offcompile.runtime.moves.registry import runtime_for

from .candidates import Candidate
from .contract import GraphFacts, Planned

#: each lane may pack in this fraction of the runtime's reserve; at most four lanes pack
PACKING_SHARE = 4


def carry_out(
    facts: GraphFacts, name: str, found: Candidate, verified: Verified | None
) -> tuple[Rewritten, WeightPlaces]:
    """Return the new graphs, and the places of their weights."""
    exact, decided = facts.options.lowering != "inductor", found.choice.decided
    _check_one_device(name, found.graphs, found.source.target.device)
    _prepare(found.source)
    placement = _placement(facts, name, found, verified)
    made = rewrite(
        found.graphs,
        found.choice.annotated,
        decided.result.plan,
        decided.order,
        found.source.target.runtime.key,
        exact,
    )
    return made, placement


def _prepare(source: ProblemSource) -> None:
    """Make the process ready for moves. Opens the spill files, so that errors show now."""
    if source.kind == "cpu":
        heap().prepare()
        tensor_memory.install()
        if malloc_leaves_holes(os.environ):
            tell_once("malloc of this glibc leaves holes between tensors: " + HINT)
    elif source.kind == "cuda":
        grow_segments()
    runtime_for(source.target.runtime.key)


def reserve(planned: Planned) -> None:
    """Tell the device which memory the plan leaves it, as long as the plan lives."""
    report = planned.report
    device = runtime_for(planned.source.target.runtime.key).device
    device.bound_packing(planned, report.memory.reserve_bytes // PACKING_SHARE)
    device.keep_room(planned, sum(gradients_on_host(report.problem, report.plan)))


def _placement(
    facts: GraphFacts, name: str, found: Candidate, verified: Verified | None
) -> WeightPlaces:
    graphs, annotated, result = found.graphs, found.choice.annotated, found.choice.decided.result
    trains, target = graphs.backward is not None, found.source.target
    by_device: Mapping[str, bool] = {}
    if isinstance(target, CudaTarget) and trains:
        by_device = advice(annotated, result.timeline, target.profile)
    made = weight_places(unplaced(facts), graphs, annotated, result.plan, by_device)
    if made.has_any and trains:
        made.watch = Watch(facts.names, partial(_tell_of_weights, name, verified))
    return made


def unplaced(facts: GraphFacts) -> WeightPlaces:
    """Leave all weights on the device."""
    target = facts.target
    return WeightPlaces(facts.parameters, target.runtime.key, target.device.type == "cpu")


def gradients_on_host(problem: Problem, plan: Plan) -> list[int]:
    """The bytes of each gradient that a step leaves on the host."""
    leaving = {d.tensor for d in plan.directs} | {m.tensor for m in plan.moves}
    gradients = (t for t in problem.tensors if t.kind == "gradient")
    return [t.nbytes for t in gradients if t.id in leaving]


def _check_one_device(name: str, graphs: Graphs, device: torch.device) -> None:
    """Raise OffloadError if the graph uses an accelerator other than `device`."""
    for _, module in graphs:
        for node in module.graph.nodes:
            value = node.meta.get("val")
            if not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
                continue
            if value.device != device:
                raise OffloadError(
                    f"{name} computes on {device} and has {node.name} on {value.device}; tensors"
                    " can only move from one device of a graph. Put each device's part of the"
                    " model into a compiled function of its own, or set memory to None."
                )


def _tell_of_weights(name: str, verified: Verified | None, finding: str) -> None:
    warn(f"{name}: {finding}")
    if verified is not None:
        verified.notes["weights"] = finding
