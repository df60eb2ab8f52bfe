"""Simulates a plan: exact timeline, peak per tier, stalls (contract §2)."""

from __future__ import annotations

from offcompile.ir import Machine, Plan, Problem, Timeline, Violation

from .compiled import CompiledPlan, CompiledProblem
from .copies import Halt
from .engine import Engine
from .pace import busy_ns
from .tolls import NS_PER_US, Tolls

__all__ = ["Simulator", "simulate"]


#: number of recent timelines to keep, as searches come back to plans that they have tried
MOST_KNOWN = 16


class Simulator:
    """Runs many plans of one problem on one machine."""

    def __init__(self, problem: Problem, machine: Machine) -> None:
        self._base = CompiledProblem(problem, machine)
        self._tolls = Tolls(self._base)
        self._known: dict[tuple[object, ...], tuple[Plan, Timeline]] = {}

    def run(self, plan: Plan, record: bool = True) -> Timeline:
        """Returns the timeline of a plan that passes `check_structure`.

        Without `record`, the timeline lists no freed copies, and stalls lack their reasons.
        """
        likeness = record, len(plan.drops), tuple(m.start_after for m in plan.moves)
        known = self._known.get(likeness)
        if known is not None and known[0] == plan:
            return known[1]
        found = self._run(plan, record)
        self._known.pop(likeness, None)
        while len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[likeness] = plan, found
        return found

    def _run(self, plan: Plan, record: bool) -> Timeline:
        base = self._base
        engine = None
        violations: tuple[Violation, ...] = ()
        try:
            engine = Engine(CompiledPlan(base, plan), record)
            engine.run()
        except Halt as halt:
            violations = halt.violations
        if engine is None:
            peaks = dict.fromkeys(base.tier_names, 0)
            return Timeline(0.0, peaks, violations=violations, settled=False)
        peaks = dict(zip(base.tier_names, engine.peak, strict=True))
        makespan_ns, note = _makespan(engine)
        return Timeline(
            makespan_us=makespan_ns / NS_PER_US,
            peak_bytes=peaks,
            spans=tuple(engine.journal.spans),
            freed=tuple(engine.journal.freed),
            stalls=tuple(engine.window.stalls),
            steps=tuple(engine.journal.steps),
            settled=engine.settled and not violations,
            note=note,
            violations=violations,
            toll_us=self._tolls.ns(engine.p, makespan_ns) / NS_PER_US,
        )


def _makespan(engine: Engine) -> tuple[int, str | None]:
    steps = engine.journal.steps
    if not steps:
        return 0, None
    start, end = steps[-1]
    if engine.settled:
        return end - start, None
    busy = [sum(engine.p.moves[i].duration_ns for i in lane) for lane in engine.p.lanes]
    note = (
        f"the schedule had not settled after {len(steps)} steps: the makespan is the"
        " largest of the last step and what each lane and shared link carries in a step"
    )
    return max(end - start, *busy, busy_ns(engine.p)), note


def simulate(problem: Problem, machine: Machine, plan: Plan, record: bool = True) -> Timeline:
    """Runs `plan` by the contract. For a bad plan the timeline has `violations`; never raises."""
    from offcompile.ir.verify import check_structure

    wrong = check_structure(problem, machine, plan)
    if wrong:
        peaks = dict.fromkeys((t.name for t in machine.tiers), 0)
        return Timeline(0.0, peaks, settled=False, violations=wrong)
    return Simulator(problem, machine).run(plan, record)
