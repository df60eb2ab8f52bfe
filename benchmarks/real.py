"""Models that people train, against their bound and against what is simpler.

    python -m benchmarks.real [--only NAME] [--seconds S] [--jobs N] [--quick]

Each row is planned in a process of its own, ahead of any hardware, and stands in the table as soon
as it is done. A run without `--only` begins a new table; with it rows of that name are made anew.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from .real_cases import CASES, NEAR_FLOOR, QUICK, Case
from .turns import machine

RESULTS = Path(__file__).parent / "results" / "real.md"
#: the rows behind the table, which may grow row by row
ROWS = RESULTS.with_suffix(".json")
GIB = 1 << 30
US_PER_MS = 1000
#: a plan that is slower than a simpler way by more than this share is behind it
BEHIND = 0.001
#: planning time of each published policy on each problem
POLICY_SECONDS = 2.0
FLOOR_SHARE = 0.05
#: gaps above it are looked into, with a search so many times as long; smaller parts go unmentioned
WIDE, LONGER, SMALL_PART = 0.06, 4, 0.05
#: processor time to prove more for those, and the slots of the first, coarse program
BOUND_SECONDS, BOUND_SLOTS = 240.0, 4
COLUMNS = (
    "model, batch × length",
    "on",
    "memory (of the plain peak)",
    "compute",
    "bound",
    "ours",
    "gap",
    "planned in",
    "checkpointed",
    "torch's budget",
    "ZeRO-Offload",
    "with checkpoints",
    "best policy",
)
Row = dict[str, Any]


# --- one row, in a process of its own ---------------------------------------------------------


def ahead_of(case: Case) -> Any:
    """Trace the model (an `Ahead`)."""
    from offcompile.ahead.batch_trace import as_arguments
    from offcompile.ahead.factories import build
    from offcompile.ahead.plan import Ahead, ForecastRequest
    from offcompile.machine.options import Options

    built = build(case.model, case.batch, case.length, "bfloat16")
    given = built.inputs(case.batch)
    named = given if isinstance(given, dict) else {}
    plain = () if isinstance(given, dict) else as_arguments(given)
    options = Options.read({"hardware": case.hardware, "reuse_plans": False})
    asked = ForecastRequest(built.model, plain, named, options, built.loss, case.optimizer)
    return Ahead.of(asked, quiet)


def extent(ahead: Any) -> tuple[int, int]:
    """The least memory that any plan needs, and the peak when nothing moves."""
    from offcompile.ahead.fitting import variants
    from offcompile.planning.floors import floor_of, peak_alone, with_reserve

    problems, machine_for = variants(ahead), ahead.survey.machine
    reserve = ahead.target.reserve_bytes
    floor = min(with_reserve(floor_of(p, machine_for), reserve) for p in problems)
    return floor, peak_alone(problems[0], machine_for)


def measured(case: Case, seconds: float | None) -> Row:
    """The row's figures, in µs and bytes; `ours` None: no plan."""
    from offcompile.ahead.fitting import published_ways, variants
    from offcompile.ahead.plan import simple_ways
    from offcompile.ir import Infeasible

    began = time.process_time()
    ahead = ahead_of(case)
    floor, alone = extent(ahead)
    ops = variants(ahead)[0].ops
    budget = min(budget_bytes(case.budget, alone, floor), ahead.target.device_bytes)
    traced = time.process_time() - began
    row: Row = {
        "compute": sum(op.duration_us for op in ops),
        "plain_peak": alone,
        "floor": floor,
        "budget": budget,
        "ops": len(ops),
        "traced_s": traced,
    }
    began = time.process_time()
    try:
        chosen = ahead.choose(budget, quiet, seconds, explains=False)
        decided = chosen.decided
        row |= {"ours": decided.result.makespan_us, "bound": decided.result.lower_bound_us}
    except Infeasible as error:
        row |= {"ours": None, "bound": None, "reason": error.reason}
    row["planned_s"] = time.process_time() - began
    gap = gap_of(row)
    if gap is not None and gap > WIDE:
        row["held"] = _held(ahead, budget, chosen)
    began = time.process_time()
    row["ways"] = [way.to_json() for way in simple_ways(ahead, budget)]
    row["compared_s"] = time.process_time() - began
    policies = published_ways(ahead, budget, POLICY_SECONDS)
    row["policies"] = [way.to_json() for way in policies]
    return row


def _held(ahead: Any, budget: int, chosen: Any) -> Row:
    """The plan of a search LONGER times as long, wherever it has the weights, and what so much more
    time proves for the places that were chosen; in µs."""
    from offcompile.bounds import lower_bound
    from offcompile.planning.fit_budget import planning_seconds

    seconds = LONGER * planning_seconds(ahead.survey.problem(ahead.graphs).problem)
    choice = ahead.choose(budget, quiet, seconds, explains=False)
    decided, problem = chosen.decided, chosen.annotated.problem
    proven = lower_bound(problem, decided.machine, BOUND_SECONDS, BOUND_SLOTS)
    return {
        "longer": min(choice.decided.result.makespan_us, decided.result.makespan_us),
        "bound": max(proven.us, decided.result.lower_bound_us),
    }


def quiet(told: str) -> None:
    """Nobody listens."""


def budget_bytes(asked: str, alone: int, floor: int) -> int:
    """A share that is below the floor is taken to be `NEAR_FLOOR`."""
    from offcompile.machine.options import Options

    near_floor = int(floor + FLOOR_SHARE * max(0, alone - floor))
    if asked == NEAR_FLOOR:
        return near_floor
    if asked.endswith("%"):
        return max(near_floor, int(alone * float(asked[:-1]) / 100))
    found = Options.read({"memory": asked}).memory_bytes(1 << 60)
    assert found is not None
    return found


# --- the table ----------------------------------------------------------------------------------


def table(rows: Iterable[tuple[Case, Row]]) -> str:
    """Markdown of the rows so far, and what they come to."""
    rows = list(rows)
    lines = [*_head(), *(_line(case, row) for case, row in rows), ""]
    gaps = [gap for _, row in rows if (gap := gap_of(row)) is not None]
    if gaps:
        lines += [
            f"Gap to the bound over {len(gaps)} rows: median {statistics.median(gaps):.1%}, worst"
            f" {max(gaps):.1%}.",
            "",
        ]
    behind = [line for case, row in rows for line in behind_of(case, row)]
    lines += ["Behind a simpler way:" if behind else "No plan is behind a simpler way.", ""]
    lines += [*behind, ""] if behind else []
    wide = [held_line(case, row) for case, row in rows if "held" in row]
    lines += [f"Gaps above {WIDE:.1%}, and what holds them:", "", *wide, ""] if wide else []
    failed = [
        f"- {case.name} on {case.place}: {row['failed']}" for case, row in rows if "failed" in row
    ]
    lines += ["Rows that could not be made:", "", *failed, ""] if failed else []
    return "\n".join(lines)


def _head() -> list[str]:
    return [
        "# Models that people train",
        "",
        "`python -m benchmarks.real`: steps planned ahead of any hardware, models in bf16, kernels",
        "fused; all times in ms, as predicted. *compute*: what the ops take when nothing waits.",
        "*bound*: no plan with the weights in the same places can be faster. *gap*: ours over the",
        "bound, less one. *planned in*: processor time of planning, and in brackets of tracing.",
        "The others are what the simple ways take on the same problem ([fit](../../docs/fit.md));",
        "of one that does not fit the GiB that it misses, in brackets. A *policy* is a published",
        "one alone.",
        "Rows that name no optimizer have no update in their times, but weights go to the host",
        "only if that gains more than torch's optimizers take to reach them there.",
        "",
        f"The newest rows: {machine()}. Earlier ones may be of another machine of two cores.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "|" + "---|" * len(COLUMNS),
    ]


def _line(case: Case, row: Row) -> str:
    if "failed" in row:
        cells = [case.name, case.place, case.budget, *("" for _ in COLUMNS[3:])]
        return "| " + " | ".join(cells) + " |"
    share = row["budget"] / row["plain_peak"]
    gap = gap_of(row)
    ways = [_way(way) for way in row["ways"]]
    policy = best_policy(row)
    cells = [
        case.name,
        case.place,
        f"{row['budget'] / GIB:.2f} GiB ({share:.0%})",
        _ms(row["compute"]),
        _ms(row["bound"]),
        "no plan" if row["ours"] is None else f"**{_ms(row['ours'])}**",
        "" if gap is None else f"{gap:.1%}",
        f"{row['planned_s']:.0f} s ({row['traced_s']:.0f} s)",
        *(ways + [""] * 4)[:4],
        f"{policy['name']} {_ms(policy['step_us'])}" if policy else "none fits",
    ]
    return "| " + " | ".join(cells) + " |"


def _ms(us: float | None) -> str:
    return "" if us is None else f"{us / US_PER_MS:,.0f}" if us >= 1e5 else f"{us / US_PER_MS:.1f}"


def _way(way: Row) -> str:
    if way["step_us"] is None:
        return "no plan"
    return _ms(way["step_us"]) if way["fits"] else f"({way['missing_bytes'] / GIB:.2f} GiB)"


def gap_of(row: Row) -> float | None:
    return row["ours"] / row["bound"] - 1 if row.get("ours") and row.get("bound") else None


def held_line(case: Case, row: Row) -> str:
    """Says if a wide gap is held by the plan or by the bound, by the part that a longer search of
    either closes."""
    ours, held = row["ours"], row["held"]
    by_plan = ours - held["longer"]
    by_bound = max(0.0, held["bound"] - row["bound"])
    open_us = max(0.0, held["longer"] - max(held["bound"], row["bound"]))
    parts = sorted(
        (
            (by_plan, f"the plan: a search {LONGER} × as long finds {_ms(held['longer'])}"),
            (by_bound, f"the bound: in {BOUND_SECONDS:.0f} s {_ms(held['bound'])} are proven"),
            (open_us, "not known"),
        ),
        reverse=True,
    )
    whole = max(sum(us for us, _ in parts), 1e-9)
    told = "; ".join(f"{us / whole:.0%} {text}" for us, text in parts if us >= SMALL_PART * whole)
    return f"- {case.name} on {case.place}, {gap_of(row):.1%}: {told}"


def best_policy(row: Row) -> Row | None:
    fitting = [way for way in row["policies"] if way["fits"]]
    return min(fitting, key=lambda way: way["step_us"], default=None)


def behind_of(case: Case, row: Row) -> list[str]:
    """Simpler ways that fit and are faster than the plan, a line each."""
    ours = row.get("ours") or float("inf")
    return [
        f"- {case.name} on {case.place} in {row['budget'] / GIB:.2f} GiB: {way['name']} takes"
        f" {_ms(way['step_us'])} ms"
        for way in [*row.get("ways", ()), *row.get("policies", ())]
        if way["fits"] and ours > way["step_us"] * (1 + BEHIND)
    ]


# --- all rows -----------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--only", metavar="NAME", help="rows whose model or card has it in its name"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="of each search for our plan")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="rows made at once")
    parser.add_argument("--quick", action="store_true", help="one small model, no file")
    parser.add_argument("--child", metavar="JSON", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        print(json.dumps(measured(Case(**json.loads(options.child)), options.seconds)))
        return
    cases = QUICK if options.quick else CASES
    known = _known() if options.only and not options.quick else {}
    asked = [c for c in cases if not options.only or options.only in f"{c.name} on {c.place}"]
    with ThreadPoolExecutor(options.jobs) as pool:
        made = {pool.submit(_in_child, case, options.seconds): case for case in asked}
        for done in as_completed(made):
            case = made[done]
            known[case] = done.result()
            ordered = [(c, known[c]) for c in cases if c in known]
            print(_line(case, known[case]), *behind_of(case, known[case]), sep="\n", flush=True)
            if not options.quick:
                RESULTS.write_text(table(ordered), "utf-8")
                _keep(ordered)
    if options.quick:
        print(table(known.items()))


def _in_child(case: Case, seconds: float | None) -> Row:
    command = [sys.executable, "-m", "benchmarks.real", "--child", json.dumps(case.to_json())]
    command += [] if seconds is None else ["--seconds", str(seconds)]
    done = subprocess.run(
        command, capture_output=True, text=True, env=dict(os.environ), check=False
    )
    if done.returncode != 0:
        last = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return {"failed": last[-1]}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return found


def _known() -> dict[Case, Row]:
    if not ROWS.exists():
        return {}
    return {Case(**kept["case"]): kept["row"] for kept in json.loads(ROWS.read_text("utf-8"))}


def _keep(rows: Iterable[tuple[Case, Row]]) -> None:
    kept = [{"case": case.to_json(), "row": row} for case, row in rows]
    ROWS.write_text(json.dumps(kept, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
