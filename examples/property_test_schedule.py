"""Hold a schedule of your own to every law, on problems that hypothesis draws.

    python examples/property_test_schedule.py
    pytest examples/property_test_schedule.py

`LargestAway` is a policy as you might write one. The test says: whatever the problem and the
machine, its plan is lawful, keeps within every tier, and is no faster than the proven bound; or it
says that nothing fits. If that ever fails, hypothesis shows the smallest problem on which it does.
The file also shows how a plan that is wrong gets caught.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, given, settings

from offcompile.bounds import lower_bound
from offcompile.ir import HOST, Infeasible, Machine, Plan, Problem
from offcompile.ir.jsonio import loads_problem, machine_from_toml
from offcompile.passes.build import schedule
from offcompile.passes.build.contract import Judge
from offcompile.passes.build.decisions import Away, Decisions
from offcompile.planning.planner import certify, check_plan, judge_for
from offcompile.testing import problems_with_machines

#: sums of floats
TOLERANCE = 1e-6


@dataclass(frozen=True)
class LargestAway:
    """The largest tensors wait on the host between their uses, as many as are asked for."""

    count: int = 2
    judge: Judge | None = None
    name: ClassVar[str] = "largest_away"

    def apply(self, problem: Problem, machine: Machine, plan: Plan) -> Plan:
        if HOST not in machine.tier:
            return schedule.build(problem, machine, Decisions(), self.judge)
        # a gap lies between two uses
        uses = {t.id: [op.id for op in problem.ops if t.id in op.reads] for t in problem.tensors}
        often = [t for t in problem.tensors if t.nbytes and len(set(uses[t.id])) > 1]
        chosen = sorted(often, key=lambda t: (-t.nbytes, t.id))[: self.count]
        away = tuple(Away(t.id, uses[t.id][0]) for t in chosen)
        return schedule.build(problem, machine, Decisions(away=away), self.judge)


def examine(problem: Problem, machine: Machine) -> bool:
    """True: there is a plan, and it keeps every law. False: the policy says that nothing fits."""
    try:
        plan = LargestAway(judge=judge_for(problem, machine)).apply(problem, machine, Plan())
        timeline = certify(problem, machine, plan, LargestAway.name)
    except Infeasible as error:
        assert error.smallest_change
        return False
    assert check_plan(problem, machine, plan).valid
    for tier in machine.tiers:
        if tier.capacity_bytes is not None:
            assert timeline.peak_bytes[tier.name] <= tier.capacity_bytes
    bound = lower_bound(problem, machine, seconds=0.05)
    assert bound.us <= timeline.makespan_us * (1 + TOLERANCE)
    return True


def law(count: int) -> Callable[[], None]:
    """`examine` on so many problems."""

    @settings(
        max_examples=count, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(problems_with_machines())
    def holds(both: tuple[Problem, Machine]) -> None:
        problem, machine = both
        if HOST in machine.tier:  # as large as it has to be
            machine = machine.with_capacity(HOST, None)
        examine(problem, machine)

    return holds


test_largest_away = law(300)


def wrong_plan() -> str:
    """The fault found in a plan without moves, where weights that take turns need some."""
    folder = Path(__file__).parent / "plans"
    problem = loads_problem((folder / "tiny.json").read_text())
    machine = machine_from_toml((folder / "tiny.machine.toml").read_text())
    return str(check_plan(problem, machine, Plan()).violations[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--examples", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="thirty problems")
    asked = parser.parse_args()
    count = 30 if asked.quick else asked.examples
    law(count)()
    print(f"{count} problems: every plan lawful, within its tiers, and not below the bound")
    print(f"a wrong plan: {wrong_plan()}")


if __name__ == "__main__":
    main()
