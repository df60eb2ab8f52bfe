"""The plan of every policy for three small problems, word for word.

A refactoring must change no plan. `pytest tests/laws/test_golden.py --update-golden` rewrites the
files; read the difference before committing it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from golden_problems import PROBLEMS
from test_laws import SPECS

from offcompile.ir import Infeasible, Plan
from offcompile.ir.textio import print_plan
from offcompile.passes.registry import make
from offcompile.planning.planner import certify, judge_for

GOLDEN = Path(__file__).parent / "golden"


def described(problem_name: str, spec: str) -> str:
    problem, machine = PROBLEMS[problem_name]()
    try:
        plan = make(spec, judge_for(problem, machine)).apply(problem, machine, Plan())
        timeline = certify(problem, machine, plan, spec)
    except Infeasible as error:
        return f"# {spec} on {problem_name}: infeasible\n# {error}\n"
    peaks = ", ".join(f"{tier} {peak}" for tier, peak in timeline.peak_bytes.items())
    stalls = "".join(
        f"# stall before {s.op}: {s.duration_ns} ns, waiting for {', '.join(s.waited_for)}\n"
        for s in timeline.stalls
    )
    return (
        f"# {spec} on {problem_name}: {timeline.makespan_us} µs, peak bytes {peaks}\n{stalls}"
        + print_plan(plan)
    )


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("problem_name", PROBLEMS)
def test_golden(problem_name: str, spec: str, update_golden: bool) -> None:
    path = GOLDEN / problem_name / (spec.replace(":", "-").replace(",", "-") + ".txt")
    got = described(problem_name, spec)
    if update_golden:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(got)
        pytest.fail(f"{path.name} rewritten: read the difference, then run without the flag")
    assert path.exists(), f"no golden file yet: run with --update-golden ({path})"
    assert got == path.read_text()
