"""Decides how many of an optimizer's states the device keeps, if the optimizer leaves that open.

States that the device keeps take memory that activations could have; states beside it cross the
link, or the slower host works on them. So a graph is planned with all of them on the device, with
half, and with none, until no smaller share can be better.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offcompile.ir import Infeasible
from offcompile.machine.hardware import BYTES_PER_US_PER_GBPS, HardwareProfile

from .candidates import Candidate
from .contract import FreeStates
from .planner import GraphPlanner

#: shares of the states on the device that are planned for, in this order
SHARES = (1.0, 0.5, 0.0)
#: a plan whose step takes no more than this times its ops is good enough: no smaller share is tried
ENOUGH = 1.1
#: share of the updates that the device makes with states that stream, of those it does not keep
USUAL_STREAMED = 0.5
#: GB/s of an optimizer on the host, if not measured
USUAL_HOST_GBPS = 50.0


def with_states(
    planner: GraphPlanner, plan: Callable[[GraphPlanner], Candidate]
) -> tuple[GraphPlanner, Candidate]:
    """Plan the graph with the share of states on the device at which a step is fastest. Returns the
    planner of that plan. Raises `Infeasible`."""
    states, request = planner.request.states, planner.request
    if states is None:
        return planner, plan(planner)
    best: tuple[float, float, GraphPlanner, Candidate] | None = None
    for share in SHARES:
        last = share == SHARES[-1]
        asked = replace(
            request,
            held_bytes=states.keep(share),
            explains=request.explains and last and best is None,
            updated_there=share + (1 - share) * USUAL_STREAMED,
        )
        asking = replace(planner, source=replace(planner.source), request=asked)
        planner.tell(f"planning with {share:.0%} of the optimizer's states on the device")
        try:
            found = plan(asking)
        except Infeasible:
            if last and best is None:
                raise
            continue
        step_us = found.choice.decided.cost_us + beside_us(planner, states, share)
        if best is None or step_us < best[0]:
            best = step_us, share, asking, found
        if not _may_gain(planner, states, best, share):
            break
    assert best is not None
    _, share, planner, found = best
    states.keep(share)
    return replace(planner, request=replace(planner.request, states=None)), found


def _may_gain(
    planner: GraphPlanner,
    states: FreeStates,
    best: tuple[float, float, GraphPlanner, Candidate],
    share: float,
) -> bool:
    """True if a smaller share than this could be faster, if nothing moved with it."""
    found = best[3]
    compute_us = sum(op.duration_us for op in found.choice.annotated.problem.ops)
    smaller = [s for s in SHARES if s < share]
    if best[0] <= ENOUGH * compute_us:
        return False
    return any(compute_us + beside_us(planner, states, s) < best[0] for s in smaller)


def beside_us(planner: GraphPlanner, states: FreeStates, share: float) -> float:
    """Estimate the time of updates beside the device. Host and link share them. Backward hides none
    of it here, since the link is busy then with other moves."""
    return (1 - share) * states.nbytes / _rate(planner.source.target.profile)


def _rate(profile: HardwareProfile) -> float:
    """Bytes of states per µs that host and link update together. The host reads and writes each
    byte, the link carries it both ways at once."""
    host = (profile.host_adam_gbps or USUAL_HOST_GBPS) / 2
    link = profile.h2d_both_gbps or profile.h2d_gbps
    return (host + link) * BYTES_PER_US_PER_GBPS
