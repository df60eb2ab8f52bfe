"""Random cyclic chains: each policy's step against the proven lower bound.

Run `python -m benchmarks.random_cyclic` (`--quick`: a few small instances) for the table in
`results/`; the instances are those of `families.random_cyclic`.
"""

from __future__ import annotations

import argparse
import platform
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.families import random_cyclic
from offcompile.ir import Infeasible
from offcompile.planning.planner import PlanResult, check_plan, plan_problem

RESULT = Path(__file__).parent / "results" / "random_cyclic.md"
POLICIES = ("weight_rotation", "joint")
SECONDS = 15.0

Case = tuple[int, int, float, float]  # seed, layers, tightness, link load


def cases(layers: Sequence[int], seeds: int) -> Iterable[Case]:
    for count in layers:
        for tightness in (0.5, 0.8, 1.0):
            for link_load in (0.5, 1.0, 1.5):
                for seed in range(seeds):
                    yield seed, count, tightness, link_load


def measure(case: Case, seconds: float) -> dict[str, PlanResult | None]:
    """One result per policy; None where the policy says that it cannot be done."""
    problem, machine = random_cyclic(*case)
    results: dict[str, PlanResult | None] = {}
    for policy in POLICIES:
        try:
            result = plan_problem(problem, machine, policy, seconds)
        except Infeasible:
            results[policy] = None
            continue
        check = check_plan(problem, machine, result.plan)
        if not check.valid:
            raise AssertionError(f"{policy} on {case}: {check.violations[0]}")
        results[policy] = result
    return results


def rows(measured: dict[Case, dict[str, PlanResult | None]]) -> list[str]:
    lines = []
    for (seed, layers, tightness, load), results in measured.items():
        found = [r for r in results.values() if r is not None]
        bound = max((r.lower_bound_us for r in found), default=0.0)
        cells = [f"{bound / 1000:.2f}"]
        for r in results.values():
            cells.append("–" if r is None else f"{100 * (r.makespan_us / bound - 1):.2f}%")
        seconds = max((r.seconds for r in found), default=0.0)
        method = next((r.bound_method for r in found if r.lower_bound_us == bound), "–")
        lines.append(
            f"| {layers} | {tightness} | {load} | {seed} | {' | '.join(cells)} | {method}"
            f" | {seconds:.1f} |"
        )
    return lines


def summary(measured: dict[Case, dict[str, PlanResult | None]]) -> list[str]:
    """Median and maximum gap per policy, per tightness and altogether."""
    lines = []
    for tightness in (*sorted({case[2] for case in measured}), None):
        for policy in POLICIES:
            gaps = []
            for case, results in measured.items():
                mine = results[policy]
                if mine is None or tightness not in (None, case[2]):
                    continue
                bound = max(r.lower_bound_us for r in results.values() if r is not None)
                gaps.append(100 * (mine.makespan_us / bound - 1))
            if gaps:
                label = "all" if tightness is None else str(tightness)
                lines.append(
                    f"| {label} | {policy} | {len(gaps)} | {statistics.median(gaps):.2f}%"
                    f" | {statistics.mean(gaps):.2f}% | {max(gaps):.2f}% |"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few small instances; no file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="at most, for each plan")
    given = parser.parse_args()
    quick = given.quick
    layers, seconds = ((6, 12), 3.0) if quick else ((6, 12, 18, 24, 36), given.seconds)
    measured = {case: measure(case, seconds) for case in cases(layers, seeds=1)}
    parts = [HEADER.format(seconds=seconds), *summary(measured), INSTANCES, *rows(measured), ""]
    parts += [f"Machine: {platform.machine()}, CPython {platform.python_version()}.", ""]
    text = "\n".join(parts)
    if not quick:
        RESULT.parent.mkdir(exist_ok=True)
        RESULT.write_text(text)
    print(text)


HEADER = """\
# Random cyclic chains against the proven bound

Steady chains with random weights, activations and durations (`benchmarks/families.py`).
Tightness 0: everything fits; 1: the least budget in which weights alone can make room. Link load:
how long a lane takes to bring every weight in twice, over the compute time. One instance for each
combination; every plan was checked.
The gap is the step over the larger of the bounds proven beside the policies, less one; the bound
holds for every lawful plan, whatever moves. {seconds:.0f} s a plan at most.

| tightness | policy | instances | median gap | mean | max |
|---|---|---|---|---|---|"""

INSTANCES = """
| layers | tightness | link load | seed | bound, ms | weight_rotation | joint | bound by | seconds |
|---|---|---|---|---|---|---|---|---|"""

if __name__ == "__main__":
    main()
