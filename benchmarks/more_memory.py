"""More memory is never slower: the steps that are planned for ten budgets of each model.

    python -m benchmarks.more_memory [--only NAME] [--quick]

The models are those of `benchmarks.real`. Rows stand in the table as soon as they are done; with
`--only`, rows of that name are made anew.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .real import ahead_of, extent, quiet
from .real_cases import CASES, QUICK, Case
from .turns import machine

RESULTS = Path(__file__).parent / "results" / "more_memory.md"
ROWS = RESULTS.with_suffix(".json")
BUDGETS = 10
#: the least budget is so much of the way from the floor to the plain peak
ABOVE_FLOOR = 0.02
GIB = 1 << 30
US_PER_MS = 1000
Row = dict[str, Any]


def measured(case: Case, budgets: int) -> Row:
    """Plan the model at each budget: bytes, and the step's µs or None."""
    from offcompile.ir import Infeasible

    ahead = ahead_of(case)
    floor, alone = extent(ahead)
    least, most = floor + ABOVE_FLOOR * (alone - floor), min(alone, ahead.target.device_bytes)
    steps: list[tuple[int, float | None]] = []
    for n in range(budgets):
        nbytes = int(least + (most - least) * n / (budgets - 1))
        try:
            decided = ahead.choose(nbytes, quiet, explains=False).decided
            steps.append((nbytes, decided.result.makespan_us))
            alone = min(alone, nbytes) if decided.fits else alone
        except Infeasible:
            steps.append((nbytes, None))
    return {"steps": steps, "plain": alone}


def worst_of(row: Row) -> float:
    """The largest share by which a step is slower than one with less memory. Budgets in which the
    step fits are left out: there nothing moves, and the graph is left alone."""
    best_us, worst = float("inf"), 0.0
    for nbytes, us in row["steps"]:
        if us is not None and nbytes < row["plain"]:
            worst, best_us = max(worst, us / best_us - 1), min(best_us, us)
    return worst


def table(rows: Iterable[tuple[Case, Row]]) -> str:
    lines = [
        "# More memory is never slower",
        "",
        "`python -m benchmarks.more_memory`: steps in ms, as planned for ten budgets of each model",
        "of [real](real.md), from near the floor to the plain peak or the whole card. *slower*: at",
        "most so much slower than with less memory. Budgets in which all of the step fits stand in",
        "brackets, and do not count: such a step is left as it is.",
        "",
        f"{machine()}.",
        "",
        "| model, batch × length | on | GiB: ms | slower |",
        "|---|---|---|---|",
    ]
    for case, row in rows:
        steps = []
        for nbytes, us in row["steps"]:
            shown = "none" if us is None else f"{us / US_PER_MS:,.0f}"
            shown = f"{nbytes / GIB:.1f}: {shown}"
            steps.append(f"({shown})" if nbytes >= row["plain"] else shown)
        cells = (case.name, case.place, ", ".join(steps), f"{worst_of(row):.1%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def distinct() -> dict[tuple[str, str], Case]:
    """The cases of `benchmarks.real` but for their budgets."""
    return {(case.name, case.hardware): case for case in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", metavar="NAME", help="rows with this in their name")
    parser.add_argument("--quick", action="store_true", help="one small model, no file")
    asked = parser.parse_args()
    if asked.quick:
        print(table([(case, measured(case, 3)) for case in QUICK]))
        return
    kept = json.loads(ROWS.read_text("utf-8")) if ROWS.exists() and asked.only else []
    rows = {(Case(**r["case"]).name, r["case"]["hardware"]): r for r in kept}
    for key, case in distinct().items():
        if asked.only is not None and asked.only not in case.name:
            continue
        rows[key] = {"case": case.to_json(), "row": measured(case, BUDGETS)}
        print(case.name, f"{worst_of(rows[key]['row']):.1%}", flush=True)
        ROWS.write_text(json.dumps(list(rows.values()), indent=1) + "\n", "utf-8")
        RESULTS.write_text(table((Case(**r["case"]), r["row"]) for r in rows.values()), "utf-8")


if __name__ == "__main__":
    main()
