"""The audit of a recorded timeline against the contract."""

from __future__ import annotations

from collections.abc import Iterator

from offcompile.ir.errors import Violation
from offcompile.ir.model import Machine, Problem
from offcompile.ir.plan import Plan, Timeline
from offcompile.ir.units import show_bytes

from .ending import check_settled
from .ledger import Ledger
from .paces import check_paces, link_work_ns
from .record import check_makespan, check_record, queues
from .replay import Replay


def check_timeline(
    problem: Problem, machine: Machine, plan: Plan, timeline: Timeline
) -> tuple[Violation, ...]:
    """Returns every rule that `timeline` breaks, as a run of `plan`.

    The plan must pass `check_structure`. Copies are checked only if the record itself is
    complete: each span once, of the right length, in lane order.
    """
    if not timeline.steps:
        return (Violation("bad-value", "steps", "the timeline records no step"),)
    todo = queues(problem, machine, plan, timeline)
    found = list(check_record(problem, machine, timeline, todo))
    if not found and machine.shared:
        found = list(check_paces(problem, machine, timeline, todo))
    if not found:
        replay = Replay(problem, machine, plan, timeline, todo)
        replay.run()
        found += replay.findings.found
        first = [t for tasks in todo.values() for t in tasks if t.step == 0]
        links_ns = [link_work_ns(problem, x, machine, first) for x in machine.shared]
        found += check_makespan(machine, timeline, todo, max(links_ns, default=0))
        found += check_settled(timeline, replay.states)
        found += _peaks(machine, timeline, replay.ledger)
    return tuple(found)


def _peaks(machine: Machine, timeline: Timeline, ledger: Ledger) -> Iterator[Violation]:
    for tier in machine.tiers:
        peak, told = ledger.peak_bytes[tier.name], timeline.peak_bytes.get(tier.name, 0)
        if tier.capacity_bytes is not None and peak > tier.capacity_bytes:
            detail = f"{show_bytes(peak)} held at once; it has {show_bytes(tier.capacity_bytes)}"
            yield Violation("no-space", f"tier {tier.name}", detail)
        if peak != told:
            detail = f"peak is {show_bytes(peak)}, not the recorded {show_bytes(told)}"
            yield Violation("bad-value", f"peak_bytes of {tier.name}", detail)
