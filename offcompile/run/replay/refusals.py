"""Finds what keeps a plan from being captured, in words that name the fix."""

from __future__ import annotations

import torch

from offcompile.ir import DEVICE, HOST
from offcompile.run.plan.contract import GraphFacts, Planned
from offcompile.runtime.device.cuda.device import CudaDevice
from offcompile.runtime.moves.registry import runtime_for


def why_not(facts: GraphFacts, planned: Planned) -> str | None:
    """The first thing that stands in the way of capturing this plan; None if nothing does."""
    return why_never(facts) or _graph(facts, planned) or _plan(planned)


def why_never(facts: GraphFacts) -> str | None:
    """The first thing that stands in the way of any plan of this graph; None if nothing does."""
    if facts.target.device.type == "cpu":
        return "the model computes on the CPU, which has no graphs; leave cudagraphs out"
    runtime = runtime_for(facts.target.runtime.key)
    assert isinstance(runtime.device, CudaDevice)
    missing = runtime.device.streams.why_no_graphs()
    if missing is not None:
        return f"{missing}; use a torch that has them, or leave cudagraphs out"
    limit = facts.target.runtime.in_flight_bytes
    if limit is not None:
        return f"moves in flight are bound to {limit} bytes, for which the host waits in each step"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return (
            "a process group is running, whose collectives and hooks the host starts in each step;"
            " train on one rank, or leave cudagraphs out"
        )
    return None


def _graph(facts: GraphFacts, planned: Planned) -> str | None:
    if facts.symbols:
        sizes = ", ".join(map(str, facts.symbols))
        return f"its sizes are dynamic ({sizes}); compile with dynamic=False and pad inputs"
    if planned.offered is not None:
        return (
            f"it offers {len(planned.offered)} gradients to an optimizer of offcompile.optim within"
            " backward, whose updates the host starts; use an optimizer of torch's"
        )
    return None


def _plan(planned: Planned) -> str | None:
    plan = planned.report.plan
    moves = {m.id: m for m in plan.moves}
    far = [m for m in moves.values() if {m.source, m.target} - {DEVICE, HOST}]
    if far:
        return (
            f"{len(far)} of {len(moves)} moves go to the disk or come from there, where the"
            " processor takes part; give host_memory enough room for all that leaves"
        )
    packed = sorted({m.codec for m in moves.values() if m.codec is not None})
    if packed:
        return (
            f"tensors are packed ({', '.join(packed)}), and the host reads their sizes in each"
            " step; choose a policy without codecs, as policy='activation_spill'"
        )
    kinds = {t.id: t.kind for t in planned.report.problem.tensors}
    there = {d.tensor for d in plan.directs} | {m.tensor for m in moves.values()}
    others = sorted({kinds[t] for t in there} - {"activation", "weight", "gradient"})
    if others:
        return (
            f"{' and '.join(others)} tensors leave the device, not activations, weights and"
            " gradients alone; raise memory until they stay"
        )
    return None
